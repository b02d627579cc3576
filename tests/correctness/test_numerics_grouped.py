"""Grouped products: where the groups end in the patterns that are tried, and what is known of each result."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from broken_kernels import CPU, claims_of

from gemmtune.numerics import grouped, grouped_expectation
from gemmtune.numerics.grouped import GroupedExpectation, awkward_ends, grouped_expectations
from gemmtune.numerics.reference import Region
from gemmtune.problem import Problem
from gemmtune.problem.grouped_compositions import grouped_by_torch, spans
from gemmtune.problem.rows import with_groups

F32, F64 = torch.float32, torch.float64
ROWS = Problem.grouped_mm(16, 6, 5, groups=4, dtype=F32, device_type="cpu")
TERMS = Problem.grouped_k_mm(6, 5, 16, groups=4, dtype=F32, device_type="cpu")
BOTH = pytest.mark.parametrize("problem", [ROWS, TERMS], ids=lambda x: x.op)


@pytest.mark.parametrize(
    ("total", "groups", "expected"),
    [
        (16, 4, {"even": [4, 8, 12, 16], "all": [0, 0, 16, 16], "empty": [0, 7, 7, 16], "early": [3, 6, 9, 13]}),
        (16, 5, {"even": [3, 6, 9, 12, 16], "all": [0, 0, 16, 16, 16], "empty": [0, 7, 7, 15, 16], "early": [2, 5, 7, 10, 13]}),
        (16, 1, {"even": [16], "all": [16], "empty": [16], "early": [13]}),
        (2, 3, {"even": [0, 1, 2], "all": [0, 2, 2], "empty": [0, 1, 2], "early": [0, 0, 0]}),
        (0, 2, {"even": [0, 0], "all": [0, 0], "empty": [0, 0], "early": [0, 0]}),
    ],
)
def test_group_ends_of_each_pattern(total: int, groups: int, expected: dict[str, list[int]]) -> None:
    names = {"even": "even", "all": "one group has all", "empty": "empty groups", "early": "ends early"}
    found = dict(awkward_ends(total, groups))
    assert list(found) == ["uneven", *names.values(), "nothing"]
    assert {short: found[name] for short, name in names.items()} == expected
    assert found["nothing"] == [0] * groups
    uneven = found["uneven"]
    assert (len(uneven), uneven[-1]) == (groups, total)
    assert uneven == sorted(uneven)


def test_uneven_groups_end_anywhere() -> None:
    assert set(dict(awkward_ends(3, 200))["uneven"]) == {0, 1, 2, 3}


def test_spans_of_groups() -> None:
    assert spans([3, 3, 7], 9) == [(0, 3), (3, 3), (3, 7)]
    assert spans([5, 2, 20, -1], 9) == [(0, 5), (5, 5), (5, 9), (9, 9)]


@pytest.mark.parametrize(
    ("size", "stride", "itemsize", "takes"),
    [
        ((4, 8), (8, 1), 2, True), ((4, 8), (1, 8), 2, True), ((4, 12), (12, 1), 2, False), ((4, 12), (12, 1), 4, True),
        ((4, 8), (4, 1), 4, False), ((8, 4), (1, 4), 4, False), ((8, 4), (1, 8), 4, True), ((4, 8), (16, 2), 2, False),
        ((4, 0), (8, 1), 2, True), ((4, 0), (0, 1), 2, False), ((0, 4), (1, 0), 2, False), ((12, 4), (1, 12), 2, False),
    ],
)  # fmt: skip
def test_layouts_supported_by_torch_grouped_mm(size: tuple[int, int], stride: tuple[int, int], itemsize: int, takes: bool) -> None:
    assert grouped_by_torch(size, stride, itemsize) == takes


def plain(problem: Problem, a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return torch's product of each group, [B, M, N], with NaN in rows of no group."""
    result = torch.full((problem.batch, problem.m, problem.n), math.nan, dtype=F64)
    begin = 0
    for g, end in enumerate(ends):
        if problem.divides_terms:
            result[g] = a[:, begin:end] @ b[begin:end]
        else:
            result[0, begin:end] = a[begin:end] @ b[g]
        begin = end
    return result


@BOTH
def test_reference_is_the_product_of_each_group(problem: Problem) -> None:
    made = grouped_expectations(problem, CPU)
    patterns = ("uneven", "even", "one group has all", "empty groups", "ends early", "nothing")
    assert [x.name for x in made] == [*(f"integers, {name}" for name in patterns), "one-hot a", "poisoned", "random"]
    for expectation in made:
        assert isinstance(expectation, GroupedExpectation)
        operands = expectation.operands
        assert operands.offs is not None
        ends, (value,), (magnitude,) = operands.offs.tolist(), expectation.values, expectation.magnitudes
        a, b = operands.a.double(), operands.b.double()
        right, above = plain(problem, a, b, ends), plain(problem, a.abs(), b.abs(), ends)
        known = ~magnitude.isnan()
        assert torch.equal(known, ~above.isnan() | (magnitude == math.inf))
        finite = magnitude.isfinite()
        torch.testing.assert_close(value[finite], right[finite])
        torch.testing.assert_close(
            magnitude[finite], above.nan_to_num()[finite], msg="only the value is right where it is infinite"
        )
        assert expectation.terms == (tuple(x - y for x, y in zip(ends, [0, *ends], strict=False)) if problem.divides_terms else ())
        if expectation.name == "poisoned" and problem.divides_terms:
            begin, end = [0, *ends][problem.groups // 2], ends[problem.groups // 2]
            assert a[:, begin:end].isnan().nonzero().tolist() == [[problem.m - 1, end - 1 - begin]], "the last term of a group"
        if expectation.name.startswith("integers"):
            assert set(a.unique().tolist()) == set(b.unique().tolist()) == {-1, 0, 1}
        else:
            assert b[b.isfinite()].abs().min() >= 2.0**-6


@BOTH
def test_allowed_error_of_a_grouped_result(problem: Problem) -> None:
    """Exact sums allow no error, other sums the bound of their terms, and rows of no group anything."""
    claims = claims_of(F32)
    everything = slice(0, problem.batch), slice(0, problem.m)
    for expectation in grouped_expectations(problem, CPU):
        assert isinstance(expectation, GroupedExpectation)
        (part,) = expectation.parts(problem, claims)
        error, magnitude = part.sums(*everything).error, expectation.magnitudes[0]
        assert (part.equal is not None) == (expectation.exactness == "bits")
        assert torch.equal(error == math.inf, magnitude.isnan() | (magnitude == math.inf))
        finite = magnitude.isfinite()
        if expectation.exactness:
            assert not error[finite].any()
        elif finite.any():
            counts = expectation.terms or (problem.k,)
            bounds = [expectation._bound(problem, claims, terms=count) for count in counts]
            expected = torch.stack([bound(m) for bound, m in zip(bounds, magnitude, strict=True)])
            assert torch.equal(error[finite], expected[finite])
    large = next(x for x in grouped_expectations(problem, CPU) if x.name == "integers, one group has all")
    (part,) = large.parts(problem, claims_of(F32, partials=torch.float8_e5m2))
    assert part.sums(*everything).error.any(), "sums of integers that the claimed types do not hold"


@BOTH
def test_one_hot_rows_pick_the_first_and_the_last_term_of_each_group(problem: Problem) -> None:
    probe = next(x for x in grouped_expectations(problem, CPU) if x.name == "one-hot a")
    assert probe.operands.offs is not None
    ends = probe.operands.offs.tolist()
    pieces = spans(ends, 16) if problem.divides_terms else [(0, problem.k)]
    a = probe.operands.a
    assert set(a.unique().tolist()) == {0, 1}
    for begin, end in pieces:
        if begin < end:
            assert (a[:, begin:end].sum(dim=1) == 1).all()
            assert a[0, begin] == a[-1, end - 1] == 1


@pytest.mark.parametrize("stride", [(0, 1), (2, 1)])
def test_there_are_no_one_hot_rows_in_rows_that_share_memory(stride: tuple[int, int]) -> None:
    problem = dataclasses.replace(ROWS, a=dataclasses.replace(ROWS.a, stride=stride))
    assert not [x for x in grouped_expectations(problem, CPU) if x.name == "one-hot a"]


def test_large_problems_have_fewer_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    for macs, count in ((16 * 6 * 5, 9), (16 * 6 * 5 - 1, 5)):
        monkeypatch.setattr(grouped, "EXPENSIVE_MACS", {"cpu": macs, "cuda": 0})
        assert len(grouped_expectations(ROWS, CPU)) == count


@BOTH
def test_samples_are_of_their_rows_and_columns(problem: Problem) -> None:
    made = grouped.GroupedProbes(problem, CPU)
    whole = made.random([3, 3, 10, 14])
    pieces = spans([3, 3, 10, 14], 16)
    find = grouped_expectation.of_terms if problem.divides_terms else grouped_expectation.of_rows
    for region in (Region(rows=torch.tensor([0, 3, 5])), Region(cols=torch.tensor([1, 4]))):
        value, magnitude = find(problem, whole.operands, pieces, region)
        torch.testing.assert_close(value, region.of(whole.values[0]))
        torch.testing.assert_close(magnitude, region.of(whole.magnitudes[0]), equal_nan=True)


def test_numbers_of_8_bits_that_are_not_finite_count_as_zero() -> None:
    x = torch.tensor([1.5, math.inf, -math.inf, math.nan]).to(torch.float8_e5m2)
    found = grouped_expectation._finite(x)
    assert found.dtype == torch.float8_e5m2
    assert found.float().tolist() == [1.5, 0.0, 0.0, 0.0]


def test_fewer_groups_have_fewer_matrices_and_ends() -> None:
    fewer = with_groups(ROWS, 2)
    assert fewer.offs is not None
    assert (fewer.b.size, fewer.offs.size, fewer.a, fewer.scale_b) == ((2, 5, 6), (2,), ROWS.a, None)
