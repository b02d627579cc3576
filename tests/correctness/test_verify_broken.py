"""Verifier finds every kernel that is broken on purpose, and says how it is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from broken_kernels import blocks, kernel, narrowed, rounding_blocks, split_k, tf32
from verify_cases import BF16, F16, F32, F64, Run, addmm, before, changed, mm, padded, verdict, with_epilogue

from gemmtune.choice import Status
from gemmtune.problem import Layout, Problem


def ragged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Wrong in the last row when M is not a multiple of 8: it repeats the row before."""
    result = a @ b
    if result.shape[-2] % 8:
        result[..., -1, :] = result[..., -2, :]
    return result


def first_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b[:1]


def outside(distance: int) -> Callable[..., None]:
    """Write one element so far from out's first one."""

    def after(out: torch.Tensor, *_: object) -> None:
        out.as_strided((1,), (1,), out.storage_offset() + distance).fill_(1.0)

    return after


def stale() -> Run:
    """Gives the result of its first call again."""
    kept: list[torch.Tensor] = []

    def run(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        if not kept:
            kept.append(a @ b)
        out.copy_(kept[0])

    return run


def early_epilogue(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
    out.copy_(sum(torch.relu(block) for block in blocks(a, b, 64)))


def swapping(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    a[[0, 1]] = a[[1, 0]]


def misread(problem: Problem, offset: int = 0) -> Run:
    """a taken as if it lay row after row without padding."""
    return before(kernel(problem), a=lambda a: a.as_strided(a.size(), (a.size(1), 1), a.storage_offset() + offset))


RELU = with_epilogue(mm(), torch.relu)
CAST = with_epilogue(mm(), lambda x: x.to(BF16) * 3.0)
ADDED, BETA_0, SQUARE = addmm(), addmm(beta=0), mm(40, 40, 40, layout="nn")
PADDED, BATCHES = padded(mm(), a=7, out=7), Problem.bmm(4, 9, 17, 33, dtype=F32, device_type="cpu")
LONG16, LONGB16 = mm(k=4096, dtype=F16), mm(k=4096, dtype=BF16)

BROKEN: dict[str, tuple[Problem, Run, str]] = {
    "last K block dropped": (mm(), kernel(mm(), lambda a, b: a[:, :-1] @ b[:-1]), "out["),
    "last K block of many dropped": (mm(k=4096), kernel(mm(), lambda a, b: a[:, :-16] @ b[:-16]), "out["),
    "last row clamped": (mm(), kernel(mm(), ragged), "out[32, "),
    "bias on the wrong axis": (ADDED, before(kernel(ADDED), inp=lambda x: x.unsqueeze(1)), "P5 cancellation: out["),
    "fp16 accumulation": (LONG16, kernel(LONG16, rounding_blocks(F16)), "P5 cancellation: out["),
    "bf16 accumulation": (LONGB16, kernel(LONGB16, rounding_blocks(BF16)), "P5 cancellation: out["),
    "fp16 partials": (LONG16, kernel(LONG16, split_k(F16)), "P5 cancellation: out["),
    "bf16 partials": (LONGB16, kernel(LONGB16, split_k(BF16)), "P5 cancellation: out["),
    "fp16 partials of a short K": (mm(k=64, dtype=F16), kernel(mm(dtype=F16), split_k(F16)), "P5 cancellation: out["),
    "alpha dropped": (ADDED, before(kernel(ADDED), alpha=lambda _: 1.0), "P5 cancellation: out["),
    "beta dropped": (ADDED, before(kernel(ADDED), beta=lambda _: 1.0), "P5 cancellation: out["),
    "inp dropped": (ADDED, before(kernel(ADDED), beta=lambda _: 0.0), "P5 cancellation: out["),
    "a read as bf16": (mm(), kernel(mm(), narrowed("a", BF16)), "P3 one-hot b: out["),
    "b read as bf16": (mm(), kernel(mm(), narrowed("b", BF16)), "P2 one-hot a: out["),
    "tf32 not asked for": (mm(), kernel(mm(), tf32), "P2 one-hot a: out["),
    "fp32 for fp64": (mm(dtype=F64), kernel(mm(dtype=F64), narrowed("a", F32)), "P3 one-hot b: out["),
    "fp32 accumulation for fp64": (mm(dtype=F64), kernel(mm(dtype=F64), rounding_blocks(F32)), "P5 cancellation: out["),
    "row stride ignored": (PADDED, misread(PADDED), "out["),
    "offset ignored": (mm(), misread(mm(), -1), "out["),
    "written before out": (mm(), changed(kernel(mm()), outside(-1)), "wrote outside of out, 1 elements before its first"),
    "written after out": (mm(), changed(kernel(mm()), outside(33 * 40)), "wrote outside of out, 1 elements after its last"),
    "row written after out": (mm(), changed(kernel(mm()), outside(40 * 40)), "wrote outside of out, 281 elements after its last"),
    "written between rows": (PADDED, changed(kernel(PADDED), outside(42)), "wrote into the padding of out, 42 elements after"),
    "element left unwritten": (
        mm(), before(kernel(mm()), out=lambda out: out[:, :-1], b=lambda b: b[:, :-1]), "out[0, 39] was not written"),
    "nothing written": (mm(), lambda *_: None, "out[0, 0] was not written"),
    "inp read with beta 0": (
        BETA_0, lambda out, a, b, inp, alpha, beta, _: out.copy_(a @ b * alpha + beta * inp), "= nan, expected"),
    "a changed": (mm(), changed(kernel(mm()), lambda out, a, b: a[3].mul_(2)), "the call changed its input: a of "),
    "b changed": (mm(), changed(kernel(mm()), lambda out, a, b: b[0, :1].fill_(5)), "the call changed its input: b of "),
    "a reordered": (mm(), changed(kernel(mm()), swapping), "the call changed its input: a of "),
    "stale result": (mm(), stale(), "out["),
    "first batch for all": (BATCHES, kernel(BATCHES, first_batch), "out[1, "),
    "a transposed": (SQUARE, before(kernel(SQUARE), a=lambda a: a.T), "out["),
    "epilogue before the last partial sum": (RELU, early_epilogue, "out["),
    "NaN swallowed": (RELU, lambda out, a, b, *_: out.copy_((a @ b).nan_to_num(0).clamp_min(0)), "expected nan"),
    "infinity swallowed": (mm(), lambda out, a, b, *_: out.copy_((a @ b).clamp(-1e30, 1e30)), "= 1.00000002e+30, expected inf"),
    "NaN spread": (mm(), changed(kernel(mm()), lambda out, a, b: out[1:2].add_(out[:1] * 0)), "= nan, expected"),
    "cast in the epilogue left out": (CAST, lambda out, a, b, *_: out.copy_(a @ b * 3.0), "out["),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "run", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_kernels_are_found(problem: Problem, run: Run, reason: str) -> None:
    result = verdict(problem, run)
    assert result.status == Status.WRONG_RESULT
    assert reason in result.reason


@pytest.mark.parametrize("name", ["last K block dropped", "last row clamped", "a transposed", "element left unwritten"])
def test_broken_kernels_are_found_where_no_element_can_be_picked(name: str) -> None:
    problem = dataclasses.replace(SQUARE, a=Layout(size=(40, 40), stride=(3, 1), dtype=F32))
    run = {
        "last K block dropped": kernel(problem, lambda a, b: a[:, :-1] @ b[:-1]),
        "last row clamped": kernel(problem, lambda a, b: (a @ b)[[*range(39), 38]]),
        "a transposed": kernel(problem, lambda a, b: a.T @ b),
        "element left unwritten": before(kernel(problem), out=lambda out: out[:-1], a=lambda a: a[:-1]),
    }[name]
    assert verdict(problem, run).status == Status.WRONG_RESULT
