"""Tests of the suite itself: every mutant is rejected, by the property meant for it and with the right diagnosis."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mutants.gemm import Gemm
from mutants.table import KINDS, MUTANTS, Mutant
from mutants.trial import convicted
from rotation import takes

from gemmtune.conformance.properties.table import property_named
from gemmtune.conformance.runs.isolation import InProcessRunner, IsolatedRunner, Runner

LEAST_DIAGNOSED = 14
"""Minimum number of kinds with a diagnosis."""
SIZE = 64
IN_TORCH = [mutant for mutant in MUTANTS if "triton" not in mutant.target]
ALWAYS_WRONG = (
    "sums:last_k_block_dropped",
    "sums:first_k_block_dropped",
    "sums:partial_sum_lost_sometimes",
    "sums:partial_sum_twice_sometimes",
    "sums:wrong_at_the_first_call",
    "reading:last_row_clamped",
    "two_products:second_product_left_out",
)
"""Mutants that are wrong always, or in one call of four."""
HEAVY = "sums:last_term_dropped_past_8191"
"""Mutant whose diagnosis needs the seventh long sum, which only some commits test."""
TRIED = [mutant for mutant in MUTANTS if mutant.target != HEAVY or takes("a bug of long sums")]


@pytest.fixture
def runner(mutant: Mutant) -> Iterator[Runner]:
    """Yield a runner, in this process if the mutant cannot harm it."""
    made: Runner = IsolatedRunner(mutant.spec, "cuda") if mutant.cuda else InProcessRunner(mutant.spec, "cpu")
    yield made
    made.close()


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, id=mutant.name, marks=pytest.mark.gpu if mutant.cuda else ()) for mutant in TRIED],
)
def test_mutant_is_rejected_with_its_diagnosis(mutant: Mutant, runner: Runner) -> None:
    outcomes = convicted(mutant, runner)
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    assert outcomes, f"{mutant.name} survives {mutant.killed_by}"
    assert mutant.killed_by in {failure.property_name for failure in failures}
    diagnoses = {failure.diagnosis for failure in failures}
    assert not mutant.diagnosis or any(mutant.diagnosis in text for text in diagnoses), diagnoses


def test_every_kind_of_bug_has_a_mutant_on_the_cpu_and_most_have_a_diagnosis() -> None:
    assert sorted(KINDS) == list(range(1, len(KINDS) + 1))
    assert {mutant.kind for mutant in MUTANTS if not mutant.cuda} == set(KINDS)
    assert len({mutant.kind for mutant in MUTANTS if mutant.diagnosis and not mutant.cuda}) >= LEAST_DIAGNOSED
    assert len({mutant.target for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        property_named(mutant.killed_by)


def gemm_of(mutant: Mutant) -> Gemm:
    module, _, name = mutant.target.partition(":")
    gemm = getattr(importlib.import_module(module), name)
    assert isinstance(gemm, Gemm)
    return gemm


def called(gemm: Gemm, op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the result of ``op`` for small integers, without scalars and added operand."""
    x, y, zero, one = a.float(), b.float(), torch.zeros(SIZE), torch.ones(())
    calls = {
        "mm": lambda: gemm.mm(x, y),
        "addmm": lambda: gemm.addmm(zero, x, y),
        "bmm": lambda: gemm.bmm(x[None], y[None]),
        "baddbmm": lambda: gemm.baddbmm(zero, x[None], y[None]),
        "mm_plus_mm": lambda: gemm.mm_plus_mm(*(part for half in zip(x.chunk(2, 1), y.chunk(2), strict=True) for part in half)),
        "int_mm": lambda: gemm.int_mm(a.to(torch.int8), b.to(torch.int8)),
        "int_mm_mul": lambda: gemm.int_mm_mul(a.to(torch.int8), b.to(torch.int8), one),
        "mixed_mm": lambda: gemm.mixed_mm(x, b.to(torch.int8)),
        "scaled_mm": lambda: gemm.scaled_mm(
            x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn), scale_a=one, scale_b=one, out_dtype=torch.float32
        ),
    }
    return calls[op]()


@pytest.mark.parametrize("mutant", IN_TORCH, ids=lambda mutant: mutant.name)
def test_mutant_is_right_for_simple_cases(mutant: Mutant) -> None:
    """Check whole tiles, plain strides, no scalars and small positive numbers. A mutant wrong there has a second bug."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randint(0, 3, (SIZE, SIZE), generator=generator) for _ in "ab")
    gemm = gemm_of(mutant)
    wrong = [op for op in gemm.gemm_traits.ops or () if not torch.equal(called(gemm, op, a, b).long().reshape(SIZE, SIZE), a @ b)]
    assert bool(wrong) == (mutant.name in ALWAYS_WRONG)


def test_the_documented_table_of_mutants_matches_the_tests() -> None:
    """Compare the rows with the table. Rows of mutants for a GPU are empty until they are made on one."""
    text = (Path(__file__).parents[2] / "docs" / "mutants.md").read_text()
    body = text.split("<!-- mutants:")[1].split("<!-- end of mutants -->")[0]
    lines = [line for line in body.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    assert [row[0] for row in rows] == [f"| `{mutant.name}`" for mutant in MUTANTS]
    for mutant, (_, kind, rejected_by, diagnosis, *usual) in zip(MUTANTS, rows, strict=True):
        assert kind == KINDS[mutant.kind]
        if rejected_by or not mutant.cuda:
            assert rejected_by.startswith(f"**{mutant.killed_by}**")
            assert mutant.diagnosis in diagnosis
            assert {word.rstrip(" |") for word in usual} <= {"passes", "fails"}
