"""The conformance suite on products of whole tiles in every dimension: bugs that only they show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from grouped_gemms import TRAITS, Grouped
from mutants.gemm import DENSE, Gemm

from gemmtune.conformance.bench.outcome import CaseStatus
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Level, Scope
from gemmtune.conformance.gemms.backends import EVERYTHING
from gemmtune.conformance.properties.property import Property
from gemmtune.conformance.properties.table import property_named
from gemmtune.conformance.runs.isolation import judge
from gemmtune.declaration.labels import OPS
from gemmtune.declaration.subject import NamespaceSubject, Subject
from gemmtune.declaration.traits import Traits

Tensor = torch.Tensor
Product = Callable[[Tensor, Tensor], Tensor]
TILES = property_named("full-tiles")
TWICE_FROM, CUT_FROM = 384, 256
"""Sizes M, N and K from which the mutants are wrong."""
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")


def smallest(a: Tensor, b: Tensor) -> int:
    return min(a.shape[-2], a.shape[-1], b.shape[-1])


def half_twice(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of large operands with half of the terms taken twice."""
    if smallest(a, b) < TWICE_FROM:
        return a @ b
    half = a.shape[-1] // 2
    return a @ b + a[..., :half] @ b[..., :half, :]


def cut_off(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of large float32 operands with ten bits of the significand."""
    if smallest(a, b) < CUT_FROM or a.dtype != torch.float32:
        return a @ b
    return _ten_bits(a) @ _ten_bits(b)


def _ten_bits(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def dense(product: Product) -> Subject:
    return NamespaceSubject("dense", Gemm(product=product), dataclasses.replace(DENSE, dtypes=("float32",)))


def grouped(product: Product) -> Subject:
    def of_groups(a: Tensor, b: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
        parts = [product(a[begin:end], b[g]) for g, (begin, end) in enumerate(pieces)]
        return torch.cat([*parts, a.new_zeros((len(a) - pieces[-1][1], b.shape[-1]))])

    rows = tuple(op for op in TRAITS.ops or () if op != "grouped_k_mm")
    traits = dataclasses.replace(TRAITS, ops=rows, dtypes=("float32", "float8_e4m3fn"))
    return NamespaceSubject("grouped", Grouped(multiply=of_groups), traits)


def sparse(product: Product) -> Subject:
    def bsr_mm(bsr: Tensor, x: Tensor) -> Tensor:
        return product(x.t().contiguous(), bsr.to_dense().t().contiguous()).t()

    return NamespaceSubject("sparse", SimpleNamespace(bsr_mm=bsr_mm), Traits(dtypes=("float32",)))


def cases_of(wanted: Property, gemm: Subject) -> list[Case]:
    return list(wanted.cases(Scope(traits=gemm.traits)))


@pytest.mark.rotates(3)
@pytest.mark.parametrize("make", [dense, grouped, sparse])
def test_bugs_of_large_products_are_found(make: Callable[[Product], Subject]) -> None:
    right = make(torch.matmul)
    cases = cases_of(TILES, right)
    assert {case.op for case in cases} == set(right.traits.ops or ())
    assert {judge(right, case, torch.device("cpu")).status for case in cases} == {CaseStatus.PASSED}
    for product in (half_twice, cut_off):
        # Narrow numbers have no more than ten bits: nothing is cut off.
        exact = {"scaled_grouped_mm", "mixed_grouped_mm"} if product is cut_off else set()
        missed = {case.op: case for case in cases if case.op not in exact}
        for case in cases:
            if case.op in missed and judge(make(product), case, torch.device("cpu")).status is CaseStatus.FAILED:
                del missed[case.op]
        assert not missed, product


def test_smaller_products_do_not_show_them() -> None:
    for product in (half_twice, cut_off):
        wrong = dense(product)
        cases = [case for name in ("edges", "bound") for case in cases_of(property_named(name), wrong)]
        assert {judge(wrong, case, torch.device("cpu")).status for case in cases[::4]} == {CaseStatus.PASSED}


def test_every_operation_and_dtype_has_a_case_at_level_smoke() -> None:
    scope = Scope(traits=EVERYTHING, level=Level.SMOKE)
    cases = list(TILES.cases(scope))
    assert {(case.op, case.dtype) for case in cases} == {(op, dtype) for op in OPS for dtype in scope.tested_dtypes(op)}
    assert all(min(case.m * int(case.each or 1), case.n, case.k) >= 512 for case in cases)
