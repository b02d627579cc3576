"""Samples of cases: each property, operation and dtype is represented, reproducibly."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch

from gemmtune.conformance.bench.outcome import heat_map
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.sampling import Sample, sample_order
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.declaration.traits import Traits

SCOPE = Scope(traits=Traits(ops=("mm", "addmm", "bmm"), dtypes=("float16", "bfloat16"), out=True))
CASES = [case for p in PROPERTIES if p.needs(SCOPE) is None for case in p.cases(SCOPE)]
NAMES = list(dict.fromkeys(case.property_name for case in CASES))


def test_a_sample_order_has_the_same_cases() -> None:
    assert Counter(sample_order(CASES, seed=0)) == Counter(CASES)


def test_each_round_has_every_property() -> None:
    order = sample_order(CASES, seed=0)
    assert [case.property_name for case in order[: len(NAMES)]] == NAMES
    least = min(Counter(case.property_name for case in CASES).values())
    assert set(Counter(case.property_name for case in order[: least * len(NAMES)]).values()) == {least}


def test_operations_and_dtypes_alternate() -> None:
    first = sample_order(CASES, seed=0)[: len(NAMES)]
    assert {(case.op, case.dtype) for case in first} == {(case.op, case.dtype) for case in CASES}
    some = [case for case in sample_order(CASES, seed=0) if case.property_name == "bound"][:6]
    assert len({(case.op, case.dtype) for case in some}) == 6


def test_the_seed_sets_the_order() -> None:
    assert sample_order(CASES, seed=3) == sample_order(CASES, seed=3) != sample_order(CASES, seed=4)
    assert sample_order([], seed=0) == []


def test_addresses_within_a_declared_alignment_may_not_be_refused() -> None:
    case = Case(property_name="alignment", op="mm", dtype="float32", m=16, n=16, k=16, a="row@1")
    undeclared, declared = (Scope(traits=Traits(ops=("mm",), dtypes=("float32",), **given)) for given in ({}, {"min_alignment": 4}))
    assert undeclared.may_refuse(case)
    assert not declared.may_refuse(case)
    assert declared.may_refuse(case.changed(a="col@1"))


def test_a_sample_of_every_pair_of_strides_exceeds_its_budget_above_smoke() -> None:
    pairs = (("row", "row"), ("row", "col"), ("col", "row"))
    for level, counts in ((Level.SMOKE, (6, 6)), (Level.FULL, (6, 18))):
        scope = dataclasses.replace(SCOPE, level=level)
        made = [list(Sample(budget=(6, 6, 6), pairs=pairs, every_pair=every)("x", scope)) for every in (False, True)]
        assert tuple(map(len, made)) == counts


def test_a_map_of_wrong_elements_has_at_most_64_cells_a_side() -> None:
    zeros = torch.zeros(1, 130, 64, dtype=torch.float64)
    got = zeros.clone()
    got[0, 129, 63] = 1
    heat = heat_map(got, zeros, zeros + 0.5, 0)
    assert (heat.rows, heat.cols, len(heat.cells), len(heat.cells[0])) == (130, 64, 44, 64)
    assert heat.cells[43][63] == 2
