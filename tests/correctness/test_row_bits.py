"""Comparison of the bits of rows: operands on which an order of summation shows, and rows of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from fake_choices import RUNS, fake

from gemmtune.choice import Tensors
from gemmtune.numerics.hard_rows import KINDS, with_hard_rows
from gemmtune.numerics.operands import random_operands
from gemmtune.numerics.probes import Probes
from gemmtune.numerics.some_rows import first_other_row, some_rows
from gemmtune.problem import Problem
from gemmtune.selector.some_rows import RowBits

CPU = torch.device("cpu")
M, N, K = 15, 8, 64
F8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def in_order(a: torch.Tensor, b: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return float32 sums in an order of K."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in order:
        total = total + a[:, k : k + 1] * b[k : k + 1]
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *F8], ids=str)
def test_any_other_order_shows_in_a_cancelling_row(dtype: torch.dtype) -> None:
    make = {"scales": "row"} if dtype in F8 else {"layout": "nt", "dtype": dtype}
    problem = (
        Problem.scaled_mm(M, N, K, dtype=dtype, device_type="cpu", **make)  # type: ignore[arg-type]
        if dtype in F8
        else Problem.mm(M, N, K, device_type="cpu", **make)  # type: ignore[arg-type]
    )
    operands = with_hard_rows(problem, Probes(problem, CPU).random())
    assert operands is not None
    a, b = operands.a.float(), operands.b.float()
    assert not bool((a.double() @ b.double())[[0, M - 1]].float().abs().gt(1e-3 * (a.abs() @ b.abs())[[0, M - 1]]).any())
    rising = in_order(a, b, list(range(K)))
    halves = in_order(a, b, list(range(K // 2))) + in_order(a, b, list(range(K // 2, K)))
    swapped = in_order(a, b, [1, 0, *range(2, K)][:K])
    for other in (halves, in_order(a, b, list(range(K))[::-1])):
        assert {first_other_row(rising, other, 0), first_other_row(rising[-1:], other[-1:], 0)} == {0}
    assert first_other_row(rising, swapped, 0) is None, "a sum of two commutes"
    kinds = [KINDS[row % len(KINDS)] for row in range(M)]
    assert all(bool(a[row].isnan().any()) for row in range(1, M - 1) if kinds[row] == "nan")
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        assert all(not bool(a[row].isfinite().all()) for row in range(1, M - 1) if kinds[row] == "infinite")


@pytest.mark.parametrize(("role", "stride"), [("a", (0, 1)), ("inp", (0, 1)), ("inp", (0, 0)), ("a", (3, 1))])
def test_rows_are_cut_from_operands_that_share_memory(role: str, stride: tuple[int, int]) -> None:
    """One row that is expanded, one number, and rows that overlap."""

    def of(m: int) -> Problem:
        problem = Problem.addmm(m, N, K, dtype=torch.float32, bias="mn", device_type="cpu")
        return dataclasses.replace(problem, **{role: dataclasses.replace(getattr(problem, role), stride=stride)})

    whole = random_operands(of(M), CPU, seed=1)
    for m, begin in ((1, 0), (4, 3), (M, 0)):
        part = some_rows(whole, of(m), begin)
        assert all(torch.equal(getattr(part, x), getattr(whole, x)[begin : begin + m]) for x in ("a", "inp")), (m, begin)


def test_operands_that_cannot_be_chosen_have_no_hard_rows() -> None:
    for problem in (Problem.int_mm(M, N, K, device_type="cpu"), Problem.mm(M, N, K, dtype=torch.float32, device_type="cpu")):
        operands = Probes(problem, CPU).random()
        assert (with_hard_rows(problem, operands) is None) == problem.integers


def test_any_nan_equals_any_nan_and_zeros_have_signs() -> None:
    x = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])
    other = x.clone()
    other.view(torch.int32)[0, 1] += 1
    assert first_other_row(x, other, 0) is None
    other[1, 0] = -0.0
    assert first_other_row(x, other, 0) == 1
    assert first_other_row(x, other[1:], 1) == 1


def of_groups(total: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def run(out: torch.Tensor, tensors: Tensors, _: object) -> None:
        a, b, offs, *_rest = tensors
        begin = 0
        for g, end in enumerate(offs.tolist()):
            out[begin:end] = total(a[begin:end].float(), b[g].float()).to(out.dtype)
            begin = end

    return run


def test_rows_of_groups_keep_their_bits_in_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last rows stay in their groups, which have fewer rows then."""
    order = list(range(K))
    monkeypatch.setitem(RUNS, "fixed", of_groups(lambda a, b: in_order(a, b, order)))
    monkeypatch.setitem(RUNS, "varying", of_groups(lambda a, b: in_order(a, b, order if len(a) > 4 else order[::-1])))

    def chosen(run: str, m: int) -> object:
        return fake(run, Problem.grouped_mm(m, N, K, groups=3, dtype=torch.float32, device_type="cpu"), run=run)

    whole, parts = chosen("fixed", 40), [chosen("fixed", m) for m in (1, 7, 39)]
    bits = RowBits(whole, CPU, lambda choice: choice.build())  # type: ignore[arg-type]
    assert bits.difference(parts) is None  # type: ignore[arg-type]
    reason = bits.difference([chosen("fixed", 39), chosen("varying", 3)])  # type: ignore[list-item]
    assert reason is not None
    assert reason.startswith("M = 3: random rows 0 to 2 have other bits alone than among 40 rows")
