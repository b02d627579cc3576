"""Operands with large gaps: each call has its own on one stage, and the verifier misses nothing there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_kernels import CPU, choice_of, kernel
from verify_cases import BF16, F32, addmm, changed, mm, verdict

from gemmtune.backends.table import load
from gemmtune.choice import Choice, Status
from gemmtune.device import detect
from gemmtune.numerics import slots
from gemmtune.numerics.operands import random_operands
from gemmtune.numerics.probes import Probes
from gemmtune.numerics.slots import Stage, tight, tight_problem
from gemmtune.numerics.some_rows import same_rows, some_rows
from gemmtune.problem import Layout, Problem
from gemmtune.problem.rows import row_classes
from gemmtune.selector.some_rows import RowsVerifier
from gemmtune.selector.verify import Verifier
from gemmtune.settings import Settings
from gemmtune.timing.rotation import Rotation

KEPT = ("scale_a", "scale_b", "zero_b", "offs")


@pytest.fixture(autouse=True)
def small_gaps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "LEAST_SPAN_BYTES", 0)


def with_gaps(layout: Layout) -> Layout:
    """The layout with four times the largest stride."""
    dim = max(range(len(layout.size)), key=lambda dim: layout.stride[dim] * (layout.size[dim] > 1))
    stride = tuple(4 * s if i == dim else s for i, s in enumerate(layout.stride))
    return dataclasses.replace(layout, stride=stride)


def spaced(problem: Problem, *roles: str) -> Problem:
    """The problem with gaps in these operands, or in all that may have them."""
    named = [(role, x) for role, x in (*problem.operands, ("out", problem.out)) if (role in roles if roles else role not in KEPT)]
    return dataclasses.replace(problem, **{role: with_gaps(layout) for role, layout in named})  # type: ignore[arg-type]


PROBLEMS: dict[str, Problem] = {
    "mm": spaced(mm()),
    "mm tt": spaced(mm(layout="tt", dtype=BF16)),
    "mm with itself": spaced(mm(33, 33, 33)),
    "mm by its transpose": spaced(mm(33, 33, 33, layout="nn"), "a", "b"),
    "bmm": spaced(Problem.bmm(3, 9, 17, 33, dtype=F32, device_type="cpu")),
    "b shared by a batch": dataclasses.replace(
        spaced(Problem.bmm(5, 9, 17, 33, dtype=F32, device_type="cpu")), b=Layout(size=(5, 33, 17), stride=(0, 70, 1), dtype=F32)
    ),
    "addmm": spaced(addmm("mn")),
    "mm_plus_mm": spaced(Problem.mm_plus_mm(17, 9, 33, 20, dtype=F32, device_type="cpu")),
    "int_mm": spaced(Problem.int_mm(32, 24, 40, device_type="cpu"), "a"),
    "mixed_mm": spaced(
        Problem.mixed_mm(
            9, 16, 256, dtype=F32, dtype_b=torch.int8, encoding="uint4", scales="group_128", zeros=True, device_type="cpu"
        ),
        "a",
        "b",
    ),
    "grouped_mm": spaced(Problem.grouped_mm(40, 16, 32, groups=3, dtype=F32, device_type="cpu"), "a", "b"),
}


def torchs(problem: Problem) -> Choice:
    return next(c for c in load("aten").enumerate(problem, detect("cpu"), Settings()).choices if c.baseline)


@pytest.mark.parametrize("name", PROBLEMS)
def test_right_kernels_pass(name: str):
    problem = PROBLEMS[name]
    assert tight_problem(problem) != problem
    verifier, choice = Verifier(problem, CPU), torchs(problem)
    for _ in range(2):
        found = verifier.check(choice, choice.build())
        assert found.status == Status.OK, found.reason


def spoil(x: torch.Tensor, place: int, value: float = 5.0) -> None:
    """Write a number ``place`` elements behind the start of ``x``."""
    x.as_strided((1,), (1,), x.storage_offset() + place).fill_(value)


def wide_read(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product that also reads the element behind each row of a, times zero."""
    behind = a.as_strided((*a.shape[:-1], 1), a.stride(), a.storage_offset() + a.shape[-1])
    return a @ b + 0 * behind


GAPS, GAPS_OUT = spaced(mm(), "a", "b"), spaced(mm(), "out")
WRONG: dict[str, tuple[Problem, Callable[..., Any], str]] = {
    "an element of a changed": (GAPS, changed(kernel(GAPS), lambda out, a, b: a[3].mul_(2)), "the call changed its input: a of "),
    "an element of b changed": (GAPS, changed(kernel(GAPS), lambda out, a, b: spoil(b, 0)), "the call changed its input: b of "),
    "a gap of a changed": (GAPS, changed(kernel(GAPS), lambda out, a, b: spoil(a, 200)), "the call changed its input: a"),
    "memory before b changed": (GAPS, changed(kernel(GAPS), lambda out, a, b: spoil(b, -1)), "the call changed its input: b"),
    "a gap of out changed": (GAPS_OUT, changed(kernel(GAPS_OUT), lambda out, a, b: spoil(out, 41)), "into the padding of out"),
    "memory after out changed": (
        GAPS_OUT, changed(kernel(GAPS_OUT), lambda out, a, b: spoil(out, 160 * 32 + 40)), "wrote outside of out, 1 elements after",
    ),
    "gaps read": (GAPS, kernel(GAPS, wide_read), "out["),
    "the first operands kept": (GAPS, None, "out["),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_fail_and_the_next_one_passes(name: str):
    problem, run, reason = WRONG[name]
    kept: list[torch.Tensor] = []

    def stale(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: object) -> None:
        kept[:] = kept or [a.clone()]
        out.copy_(kept[0] @ b)

    verifier = Verifier(problem, CPU)
    bad, good = choice_of(problem, run or stale), choice_of(problem, kernel(problem))
    found = verifier.check(bad, bad.build())
    assert found.status == Status.WRONG_RESULT
    assert reason in found.reason
    assert verifier.check(good, good.build()).status == Status.OK


def test_the_last_verdict_of_an_element_of_out_is_kept():
    """Guards fill out to compare it, and give it back."""
    problem = spaced(mm(), "out")
    run = changed(kernel(problem), lambda out, a, b: out[7, 9].add_(1))
    assert "out[7, 9]" in verdict(problem, run).reason


@pytest.mark.parametrize("packing", [lambda b: b.T, lambda b: b.T.contiguous(), lambda b: b], ids=["view", "copy", "itself"])
def test_packed_weights_outlive_the_stage(packing: Callable[[torch.Tensor], torch.Tensor]):
    problem = spaced(mm(prepacked=True), "a", "b")
    back = packing(torch.empty(129, 40)).shape == (40, 129)
    verifier = Verifier(problem, CPU)
    for _ in range(2):
        choice = choice_of(problem, lambda out, a, b, *_: out.copy_(a @ (b.T if back else b)), packing=packing)
        found = verifier.check(choice, choice.build())
        assert found.status == Status.OK, found.reason


def test_calls_keep_the_operands_of_others():
    problem = spaced(mm(), "a")
    stage, probes = Stage(problem, CPU), Probes(tight_problem(problem), CPU)
    first, second = probes.random(), probes.integers()
    known = first.a.clone()
    for operands in (first, second, first):
        placed = stage.place(operands)
        assert (placed.a.stride(), placed.b.data_ptr()) == (problem.a.stride, operands.b.data_ptr())
        assert torch.equal(placed.a, operands.a)
        assert not stage.changed()["a"]
    assert torch.equal(first.a, known)
    assert not stage.gaps_changed()["a"]


def test_layouts_without_gaps_keep_the_order_of_their_dimensions():
    made = tight(Layout(size=(3, 1, 8, 16), stride=(16, 7, 4096, 1), dtype=F32, offset=3))
    assert made == Layout(size=(3, 1, 8, 16), stride=(16, 7, 48, 1), dtype=F32, offset=3)
    for layout in (Layout(size=(30, 40), stride=(3, 1), dtype=F32), Layout(size=(30, 40), stride=(44, 1), dtype=F32)):
        assert tight(layout) == layout


@pytest.mark.parametrize("name", ["mm", "addmm", "mm_plus_mm"])
def test_fewer_rows_of_operands_with_gaps(name: str):
    problem = PROBLEMS[name]
    rows_class, *_ = row_classes(problem)
    for m in (1, problem.m // 2):
        choice = torchs(rows_class.at(m))
        found = RowsVerifier(problem, CPU).check(choice, choice.build())
        assert found.status == Status.OK, found.reason


def test_sets_for_timing_have_the_layouts_and_one_content():
    problem = spaced(mm(8, 16, 32))
    rotation = Rotation(problem, detect("cpu"))
    assert len(rotation.sets) > 4
    rows_class, *_ = row_classes(problem)
    for m, sets in ((8, rotation.sets), (3, rotation.of_rows(rows_class.at(3)))):
        stated = problem if m == 8 else rows_class.at(m)
        for one in sets[:5]:
            for role, layout in (*stated.operands, ("out", stated.out)):
                assert Layout.of(getattr(one, role)) == layout
            assert torch.equal(one.a, sets[0].a)
            assert torch.equal(one.b, sets[0].b)
        assert len({x.a.data_ptr() for x in sets}) == len(sets)
        buffers = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for one in sets for x in (one.a, one.b, one.out)}
        elements = sum(math.prod(layout.size) * 4 for layout in (stated.a, stated.b, stated.out))
        assert sum(buffers.values()) < 3 * elements * len(sets) + 10_000


def test_rows_of_tight_operands_are_those_of_the_problem():
    problem = spaced(mm(), "a")
    tight_ones = random_operands(tight_problem(problem), CPU, seed=1)
    spread = some_rows(tight_ones, problem, 0)
    assert Layout.of(spread.a) == problem.a
    assert spread.b is tight_ones.b
    assert same_rows(tight_ones.a, spread.a, 0)
