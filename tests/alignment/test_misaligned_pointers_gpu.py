"""Operands at unaligned addresses on a GPU: every kind of choice is right there, and no plan runs on other addresses."""

from __future__ import annotations

from collections.abc import Iterator

import misaligned
import pytest
import torch
from rotation import rotated

import gemmtune
from gemmtune import settings
from gemmtune.backends.aten import AtenChoice
from gemmtune.backends.cublaslt.algorithm import CublasLtChoice
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.padding import PaddedChoice
from gemmtune.backends.triton.swap import SwappedChoice
from gemmtune.choice import Choice
from gemmtune.device import detect
from gemmtune.dispatch.ready import forget_plans, ready
from gemmtune.numerics.buffers import POISONS, allocate, poison, storage_bits
from gemmtune.problem import Layout, Problem
from gemmtune.selector.offers import offers_for

BACKENDS = ("aten", "cublaslt", "triton", "cuda")
"""Each with kernels that are compiled in seconds; CUTLASS's have a test, and a marker, of their own."""
KINDS: tuple[type[Choice], ...] = (AtenChoice, CublasLtChoice, TritonChoice, PaddedChoice, SwappedChoice)
M, N, K = 24, 40, 56
NAMES = [
    "rows+0@0", "rows+0@1", "rows+0@2", "rows+0@4", "rows+0@8", "rows+1@0", "rows+4@3", "rows+8@0", "rows+17@7", "columns+0@1",
    "columns+1@5", "columns+8@6", "columns+17@0", "every second of rows@0", "every second of columns@3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_plans(own_store: object) -> Iterator[None]:
    """Each test makes its own plans."""
    forget_plans()
    yield
    forget_plans()


def gpu() -> torch.device:
    return torch.device("cuda")


def offered(problem: Problem, backends: tuple[str, ...]) -> tuple[Choice, ...]:
    """A few choices of each backend."""
    with settings.patch(max_profiling_configs=3, cublaslt_top_k=2, backends=backends) as chosen:
        return tuple(offers_for(problem, detect("cuda"), chosen).choices)


wherever = pytest.mark.parametrize("moved", ["a", "b", "out"])
of_each_kind = pytest.mark.parametrize(
    ("op", "dtype"), [("mm", torch.bfloat16), ("mm", torch.float32), ("addmm", torch.float16), ("bmm", torch.bfloat16)], ids=str
)


@pytest.mark.gpu
@pytest.mark.slow
@wherever
@of_each_kind
def test_every_kind_of_choice_is_right_wherever_an_operand_lies(op: str, dtype: torch.dtype, moved: str) -> None:
    assert {"aten", "triton"} <= check_wherever(op, dtype, moved, BACKENDS)


@pytest.mark.cutlass_build
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch sees none")
@wherever
@of_each_kind
def test_cutlass_is_right_wherever_an_operand_lies(op: str, dtype: torch.dtype, moved: str) -> None:
    check_wherever(op, dtype, moved, ("cutlass",))


def check_wherever(op: str, dtype: torch.dtype, moved: str, backends: tuple[str, ...]) -> set[str]:
    """Runs what is offered for each place of an operand; the backends that offered something."""
    size_a, size_b = misaligned.sizes(op, M, N, K)
    places = {"a": Layout.contiguous(size_a, dtype), "b": Layout.contiguous(size_b, dtype)}
    places["out"] = Layout.contiguous((*size_a[:-1], N), dtype)
    inp = misaligned.filled(Layout.contiguous((N,), dtype), gpu(), seed=2) if op == "addmm" else None
    wrong, served = [], set()
    for name in rotated(NAMES, 2, f"{op} {dtype} {moved}"):
        at = places | {moved: misaligned.layouts(places[moved].size, dtype)[name]}
        a, b = (misaligned.filled(at[letter], gpu(), seed) for seed, letter in enumerate("ab"))
        out, around = allocate(at["out"], gpu()), allocate(at["out"], gpu())
        poison(around, POISONS[dtype][0])
        around.copy_(misaligned.expected(op, a, b, inp))
        problem = Problem(
            op=op, a=Layout.of(a), b=Layout.of(b), out=Layout.of(out), inp=Layout.of(inp) if inp is not None else None,
            beta="one" if inp is not None else "zero", device_type="cuda",
        )  # fmt: skip
        for choice in offered(problem, backends):
            poison(out, POISONS[dtype][0])
            choice.build().run(out, (a, b) if inp is None else (a, b, inp), () if inp is None else (1.0, 1.0))
            if not torch.equal(storage_bits(out), storage_bits(around)):
                wrong.append((name, choice.name))
            served.add(choice.backend)
    assert not wrong
    return served


@pytest.mark.gpu
def test_unaligned_addresses_have_choices_on_aligned_copies_and_these_are_right() -> None:
    a, b = (misaligned.filled(misaligned.layout((64, 64), torch.bfloat16, "rows", 0, 1), gpu(), seed) for seed in (0, 1))
    problem = Problem(op="mm", a=Layout.of(a), b=Layout.of(b), out=Layout.contiguous((64, 64), torch.bfloat16), device_type="cuda")
    padded = [choice for choice in offered(problem, ("triton",)) if isinstance(choice, PaddedChoice)]
    assert padded
    for choice in padded:
        out = torch.full((64, 64), torch.nan, dtype=torch.bfloat16, device="cuda")
        choice.build().run(out, (a, b), ())
        assert torch.equal(out, misaligned.expected("mm", a, b, None)), choice.name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "allow", ["^aten", "^cublaslt", "^triton", "_pad$", None], ids=["aten", "cublaslt", "triton", "copies", "pick"]
)
def test_a_plan_for_aligned_operands_is_not_used_for_others(allow: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16
    operands = [misaligned.filled(misaligned.layout((64, 64), dtype, "rows", 0, offset), gpu()) for offset in (0, 1, 4)]
    expected = misaligned.expected("mm", operands[0], operands[0], None)
    # Aligned operands have no copies: there torch runs, and that is the point of the pattern.
    with (
        misaligned.every_run_watched(monkeypatch, *KINDS) as runs,
        settings.patch(
            backends=BACKENDS, choice_allowlist_regex=allow and f"{allow}|^aten", max_profiling_configs=2, cublaslt_top_k=2
        ),
    ):
        for _ in range(2):
            for a in operands:
                for b in operands:
                    runs.clear()
                    assert torch.equal(gemmtune.mm(a, b), expected)
                    assert (Layout.of(a), Layout.of(b)) in [(x, y) for _, x, y in runs]
        assert len(ready) == len(operands) ** 2
        assert all(plan.problem == plan.choice.problem for plan in ready.values())
