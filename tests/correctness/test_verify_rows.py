"""Choices that are proved at many Ms by the operands of the largest one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from fake_choices import CLAIMS, Fake

from gemmtune.backends.table import load
from gemmtune.choice import Choice, Kernel, Status
from gemmtune.device import detect
from gemmtune.problem import Layout, Problem, trace
from gemmtune.problem.rows import row_classes
from gemmtune.selector.samples import Sample
from gemmtune.selector.some_rows import RowsVerifier
from gemmtune.settings import Settings

N, K, MOST = 48, 256, 40
CPU = detect("cpu")
F32, F8, BF16 = torch.float32, torch.float8_e4m3fn, torch.bfloat16


def _with_epilogue(m: int) -> Problem:
    plain = Problem.mm(m, N, K, dtype=F32, device_type="cpu")
    operands = (torch.empty(m, N), torch.empty(N))
    return dataclasses.replace(plain, epilogue=trace.trace(lambda acc, x, y: (acc * x + y).relu(), F32, operands))


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "mm": lambda m: Problem.mm(m, N, K, dtype=BF16, device_type="cpu"),
    "mm-one-row-of-b": lambda m: dataclasses.replace(
        Problem.mm(m, N, K, dtype=F32, device_type="cpu"), b=Layout(size=(K, N), stride=(0, 1), dtype=F32)
    ),
    "mm-tt": lambda m: Problem.mm(m, N, K, dtype=F32, layout="tt", device_type="cpu"),
    "addmm-mn": lambda m: Problem.addmm(m, N, K, dtype=F32, bias="mn", alpha=0.5, beta=2, device_type="cpu"),
    "addmm-n": lambda m: Problem.addmm(m, N, K, dtype=F32, bias="n", device_type="cpu"),
    "baddbmm": lambda m: Problem.baddbmm(3, m, N, K, dtype=F32, device_type="cpu"),
    "mm_plus_mm": lambda m: Problem.mm_plus_mm(m, N, K, 32, dtype=F32, device_type="cpu"),
    "int_mm": lambda m: Problem.int_mm(m, N, K, device_type="cpu"),
    "mixed_mm": lambda m: Problem.mixed_mm(
        m, N, K, dtype=F32, dtype_b=torch.int8, encoding="uint4", scales="group_128", zeros=True, device_type="cpu"
    ),
    "scaled_mm-row": lambda m: Problem.scaled_mm(m, N, K, scales="row", device_type="cpu"),
    "scaled_mm-blocks": lambda m: Problem.scaled_mm(m, N, K, scales="block_1x128", device_type="cpu"),
    "bsr_mm": lambda m: Problem.bsr_mm(m, 64, K, dtype=F32, block=16, device_type="cpu"),
    "epilogue": _with_epilogue,
}


def torchs(problem: Problem) -> Choice:
    return next(c for c in load("aten").enumerate(problem, CPU, Settings()).choices if c.baseline)


@pytest.mark.parametrize("name", PROBLEMS)
def test_right_kernels_are_right_at_every_m(name: str):
    rows_class, *_ = row_classes(PROBLEMS[name](MOST))
    verifier = RowsVerifier(rows_class.at(MOST), torch.device("cpu"))
    for m in (m for m in (1, 2, 8, 24, 33, MOST) if rows_class.has(m)):
        choice = torchs(rows_class.at(m))
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, (m, verdict.reason)


def _judged(run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], m: int, problem: str = "mm") -> Sample:
    verifier = RowsVerifier(PROBLEMS[problem](MOST), torch.device("cpu"))
    choice = torchs(PROBLEMS[problem](m))
    return verifier.check(choice, Kernel(run=lambda out, tensors, scalars: run(out, *tensors[:2])))


def test_a_kernel_is_judged_by_the_rows_that_it_has():
    def last_row_forgotten(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        rows = len(out) // 4 * 4
        torch.mm(a[:rows], b, out=out[:rows])

    assert _judged(last_row_forgotten, 32).status is Status.OK
    assert "out[32, 0] was not written" in _judged(last_row_forgotten, 33).reason

    def beyond(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        torch.mm(a, b, out=out)
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()

    assert "after its last" in _judged(beyond, 7).reason

    def narrowed(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        out.copy_((a[:, : K // 2] @ b[: K // 2]) + (a[:, K // 2 :] @ b[K // 2 :]))

    assert _judged(narrowed, 7).status is Status.WRONG_RESULT

    def scribbles(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        torch.mm(a, b, out=out)
        b[0, 0] += 1

    assert "changed its input: b" in _judged(scribbles, 7).reason


PACKED: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Multiplied(Fake):
    """Wants b times a number, and divides by it."""

    factor: int

    @property
    def packed_format(self) -> str:
        return f"times {self.factor}"

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        PACKED.append(self.factor)
        return b * self.factor

    def bind(self, loaded: object) -> Kernel:
        return Kernel(run=lambda out, tensors, scalars: torch.mm(tensors[0], tensors[1] / self.factor, out=out))


def test_b_is_packed_once_for_all_ms_and_anew_for_another_format():
    problems = {m: Problem.mm(m, N, K, dtype=F32, device_type="cpu") for m in (7, 8, MOST)}
    verifier = RowsVerifier(problems[MOST], torch.device("cpu"))
    for factor, m in ((2, 7), (2, 8), (4, 8), (4, 7)):
        choice = Multiplied(name="fake:packed", backend="fake", problem=problems[m], claims=CLAIMS, factor=factor)
        verdict = verifier.check(choice, choice.build())
        assert verdict.status is Status.OK, verdict.reason
    assert PACKED == [2, 2, 4, 4], "the exact probe, and random operands"
