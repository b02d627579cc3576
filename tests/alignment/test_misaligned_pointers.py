"""Operands at unaligned addresses on the CPU, by every backend that runs there; a plan is for the addresses it was made for."""

from __future__ import annotations

import random
from collections.abc import Iterator

import misaligned
import misaligned_jobs
import pytest
import torch
from cpp_kernels import needs_compiler
from processes import Run
from rotation import rotated

import gemmtune
from gemmtune import settings
from gemmtune.backends.aten import AtenChoice
from gemmtune.backends.cpp.build import CppChoice
from gemmtune.dispatch.ready import forget_plans, ready
from gemmtune.numerics.buffers import POISONS, allocate, poison, storage_bits
from gemmtune.problem import Layout

CPU = torch.device("cpu")
CASES = [("mm", torch.bfloat16), ("mm", torch.float32), ("addmm", torch.float32), ("bmm", torch.float32), ("addmm", torch.float64)]
backends = pytest.mark.parametrize("backend", ["aten", pytest.param("cpp", marks=needs_compiler)])
cases = pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))


@pytest.fixture(autouse=True)
def no_plans(own_store: object) -> Iterator[None]:
    """Each test makes its own plans."""
    forget_plans()
    yield
    forget_plans()


def only(backend: str, **changes: object) -> object:
    """One choice of one backend, run without proving or measuring anything."""
    return settings.patch(backends=(backend,), max_profiling_configs=1, fallback_to_aten=False, verify=False, **changes)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("moved", ["a", "b"])
@cases
@backends
def test_values_wherever_an_operand_lies(backend: str, op: str, dtype: torch.dtype, moved: str) -> None:
    size_a, size_b = misaligned.sizes(op, 9, 34, 33)
    inp = misaligned.filled(misaligned.layout((9, 34), dtype, "rows", 1, 3), CPU, seed=2)
    plain = misaligned.filled(Layout.contiguous(size_b if moved == "a" else size_a, dtype), CPU, seed=1)
    wrong = []
    with only(backend):
        for name, where in misaligned.layouts(size_a if moved == "a" else size_b, dtype).items():
            x = misaligned.filled(where, CPU)
            a, b = (x, plain) if moved == "a" else (plain, x)
            before = storage_bits(x).clone()
            if not torch.equal(misaligned.called(op, a, b, inp), misaligned.expected(op, a, b, inp)):
                wrong.append(name)
            assert torch.equal(storage_bits(x), before), f"{name}: an input was changed"
    assert not wrong
    assert {plan.choice.backend for plan in ready.values()} == {backend}


@cases
@backends
def test_values_wherever_the_result_goes(backend: str, op: str, dtype: torch.dtype) -> None:
    size_a, size_b = misaligned.sizes(op, 9, 34, 33)
    a, b = (misaligned.filled(misaligned.layout(s, dtype, "rows", 1, 1), CPU, seed) for seed, s in enumerate((size_a, size_b)))
    inp = misaligned.filled(misaligned.layout((9, 34), dtype, "columns", 1, 3), CPU, seed=2)
    want = misaligned.expected(op, a, b, inp)
    with only(backend):
        for name, where in misaligned.layouts(tuple(want.shape), dtype, offsets=(0, 1, 3, 8)).items():
            out = misaligned.filled(where, CPU)
            poison(out, POISONS[dtype][0])
            assert misaligned.called(op, a, b, inp, out=out) is out
            assert torch.equal(out, want), name
            out.fill_(0)
            around = allocate(where, CPU)
            poison(around, POISONS[dtype][0])
            around.fill_(0)
            assert torch.equal(storage_bits(out), storage_bits(around)), f"{name}: something beside out was written"


@needs_compiler
def test_every_offered_choice_runs_wherever_the_operands_lie() -> None:
    dtype, size_a, size_b = torch.float32, (9, 33), (33, 34)
    for at_a, at_b in [("rows+1@1", "columns+17@3"), ("columns+4@2", "rows+1@1"), ("every second of rows@3", "rows+8@5")]:
        a = misaligned.filled(misaligned.layouts(size_a, dtype)[at_a], CPU)
        b = misaligned.filled(misaligned.layouts(size_b, dtype)[at_b], CPU, seed=1)
        with settings.patch(backends=("aten", "cpp"), search="exhaustive", tune_in_subprocess=False) as chosen:
            problem = gemmtune.explain("mm", a, b).problem
            offers = gemmtune.selector.offers.offers_for(problem, gemmtune.device.detect("cpu"), chosen)
        assert len(offers.choices) > 10
        for choice in offers.choices:
            out = torch.full((9, 34), torch.nan)
            choice.build().run(out, (a, b), ())
            assert torch.equal(out, misaligned.expected("mm", a, b, None)), (choice.name, at_a, at_b)


INTERPRETED = [
    "rows+0@1",
    "rows+1@0",
    "columns+4@3",
    "columns+1@2",
    "every second of columns@0",
]


@pytest.mark.turn(1, 6)
@pytest.mark.parametrize(
    ("op", "dtype", "allow"),
    rotated(
        [
            ("mm", torch.float32, "mm_16x32x16_s1_w1_k2"),
            ("addmm", torch.bfloat16, "mm_32x16x32"),
            ("bmm", torch.float64, "16x16x16"),
        ],
        3,
        "misaligned, interpreted",
    ),
    ids=str,
)
def test_values_by_triton_in_its_interpreter(interpreted: Run, op: str, dtype: torch.dtype, allow: str) -> None:
    assert interpreted(misaligned_jobs.wrong_layouts, op, dtype, rotated(INTERPRETED, 2, op), allow) == []


@backends
def test_a_plan_for_aligned_operands_is_not_used_for_others(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (16, 16)
    aligned = misaligned.filled(misaligned.layout(size, torch.float32, "rows", 0, 0), CPU)
    shifted = misaligned.filled(misaligned.layout(size, torch.float32, "rows", 0, 1), CPU)
    assert aligned.shape == shifted.shape
    assert aligned.stride() == shifted.stride()
    with misaligned.every_run_watched(monkeypatch, AtenChoice, CppChoice) as runs, only(backend):
        for a in (aligned, shifted, aligned, shifted):
            for b in (aligned, shifted):
                assert torch.equal(gemmtune.mm(a, b), misaligned.expected("mm", a, b, None))
                assert gemmtune.explain("mm", a, b).problem.a == Layout.of(a)
        assert [(a.offset, b.offset) for _, a, b in runs] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
        assert len(ready) == 4
        assert {(plan.problem.a.offset, plan.problem.b.offset) for plan in ready.values()} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@backends
def test_whatever_comes_in_whatever_order_each_call_has_a_plan_for_its_own_addresses(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = random.Random(0)
    every = [misaligned.layouts(size, torch.float32, offsets=range(4)) for size in ((8, 16), (16, 32), (8, 32))]
    only_moved = [[layout for name, layout in layouts.items() if name.startswith("rows+0")] for layouts in every]
    calls = [tuple(map(some.choice, only_moved)) for _ in range(40)]
    calls += [tuple(some.choice(list(layouts.values())) for layouts in every) for _ in range(40)]
    with misaligned.every_run_watched(monkeypatch, AtenChoice, CppChoice) as runs, only(backend):
        for where in (*calls, *calls):
            a, b, inp = (misaligned.filled(layout, CPU, seed) for seed, layout in enumerate(where))
            assert torch.equal(gemmtune.addmm(inp, a, b), misaligned.expected("addmm", a, b, inp))
    assert [(a, b) for _, a, b in runs] == [where[:2] for where in (*calls, *calls)]


@needs_compiler
def test_a_pick_that_was_stored_for_aligned_operands_is_not_looked_up_for_others(own_store: object) -> None:
    dtype = torch.float32
    aligned, shifted = (misaligned.filled(misaligned.layout((16, 16), dtype, "rows", 0, offset), CPU) for offset in (0, 1))
    with settings.patch(backends=("aten", "cpp"), search="quick", max_profiling_configs=1):
        gemmtune.mm(aligned, aligned)
        assert gemmtune.explain("mm", aligned, aligned).origin == "from the store"
        other = gemmtune.explain("mm", aligned, shifted)
        assert other.origin == "not tuned yet: the first call tunes it"
        assert not other.outcomes
        with settings.patch(tune="never"):
            assert torch.equal(gemmtune.mm(aligned, shifted), misaligned.expected("mm", aligned, shifted, None))
