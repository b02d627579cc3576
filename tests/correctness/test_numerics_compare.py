"""Which elements are right, element by element, and which of several bad ones a finding tells of."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from broken_kernels import CPU, claims_of

from gemmtune.numerics import judging
from gemmtune.numerics.block_sparse import sparse_of
from gemmtune.numerics.bounds import Claims, accumulation_bound, exact_limit, underflow
from gemmtune.numerics.compare import BadElement, Chunk, Finding, is_right
from gemmtune.numerics.expectation import referenced
from gemmtune.numerics.judging import Judge
from gemmtune.numerics.operands import Operands
from gemmtune.numerics.propagate import Approximate, propagate
from gemmtune.numerics.quantized import MOST_ZERO, cancelling_range
from gemmtune.numerics.reference import Region
from gemmtune.problem import Epilogue, Problem
from gemmtune.problem.epilogue import Node, Ref
from gemmtune.problem.sparsity import Sparsity

F16, F32, F64 = torch.float16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan
LARGEST = 65504.0
"""Of float16."""


@pytest.mark.parametrize(
    ("got", "value", "error", "right"),
    [
        (1.5, 1.0, 0.5, True),
        (1.5, 1.0, 0.49, False),
        (0.5, 1.0, 0.5, True),
        (NAN, NAN, 0.0, True),
        (NAN, 1.0, 100.0, False),
        (1.0, NAN, 100.0, False),
        (INF, INF, 0.0, True),
        (-INF, INF, 0.0, False),
        (-INF, 3.0, INF, True),
        (NAN, 3.0, INF, True),
        (INF, LARGEST, 1.0, True),
        (-INF, LARGEST, 1.0, False),
        (-INF, -LARGEST, 1.0, True),
        (INF, -LARGEST, 1.0, False),
        (INF, LARGEST, 0.0, False),
        (INF, 2 * LARGEST, 1.0, True),
        (-INF, 2 * LARGEST, 1.0, False),
        (LARGEST, 2 * LARGEST, 1.0, False),
        (-INF, 1.0, 2 * LARGEST, True),
        (-INF, 2.0 * LARGEST, 2.0 * LARGEST, True),
        (INF, 1.0, 1.0, False),
        (INF, NAN, 1.0, False),
    ],
)
def test_an_element_is_right_within_its_error_or_as_an_overflow_of_its_sign(
    got: float, value: float, error: float, right: bool
) -> None:
    numbers = [torch.tensor([x], dtype=F64) for x in (got, value, error)]
    assert bool(is_right(numbers[0], Approximate(value=numbers[1], error=numbers[2]), F16)) == right


def test_overflow_depends_on_the_dtype() -> None:
    got, value, error = (torch.tensor([x], dtype=F64) for x in (INF, 1e6, 1.0))
    assert bool(is_right(got, Approximate(value=value, error=error), F16))
    assert not bool(is_right(got, Approximate(value=value, error=error), F32))


def found(finding: Finding, *, batched: bool = True) -> BadElement | None:
    return finding.bad_element(finding.state.tolist(), batched=batched)


def add(finding: Finding, bad: list[int], *, row: int = 0, region: Region | None = None, bits: int = 1) -> None:
    """A chunk [1, 2, 3] whose elements ``bad`` are bad; got, expected and tolerance tell the place."""
    flags = torch.zeros(6, dtype=torch.bool)
    flags[bad] = True
    values = torch.arange(6, dtype=F64).reshape(1, 2, 3)
    chunk = Chunk(batch=0, row=row, region=region or Region(), shape=(1, 2, 3))
    finding.add(chunk, flags.reshape(1, 2, 3), torch.full((1, 2, 3), bits), values, values + 10, values + 20)


def test_finding_reports_the_first_bad_element() -> None:
    finding = Finding(CPU, 7)
    add(finding, [])
    assert found(finding) is None
    add(finding, [4, 5], row=2)
    add(finding, [0], row=4)
    assert found(finding) == BadElement(index=(0, 3, 1), got=4, expected=14, tolerance=24, unwritten=False)
    assert found(finding, batched=False) == BadElement(index=(3, 1), got=4, expected=14, tolerance=24, unwritten=False)


def test_finding_reports_unwritten_elements_and_sample_positions() -> None:
    finding = Finding(CPU, 7)
    add(finding, [5], region=Region(rows=torch.tensor([3, 8]), cols=torch.tensor([1, 2, 9])), bits=7)
    bad = found(finding, batched=False)
    assert bad == BadElement(index=(8, 9), got=5, expected=15, tolerance=25, unwritten=True)
    assert bad.text() == "out[8, 9] was not written"


def test_bad_element_is_reported_with_its_tolerance() -> None:
    bad = BadElement(index=(1, 2), got=1.5, expected=2.0, tolerance=0.25, unwritten=False)
    assert bad.text() == "out[1, 2] = 1.5, expected 2 within 0.25"
    exact = BadElement(index=(1, 2), got=1.5, expected=2.0, tolerance=0.0, unwritten=False)
    assert exact.text(" (from b[0, 2])") == "out[1, 2] = 1.5, expected 2 (from b[0, 2]) exactly"


@pytest.mark.parametrize(("alpha", "factor"), [(1, 1), (0.25, 1), (0, 1), (4, 4), (-4, 4)])
def test_underflow_is_scaled_by_alpha(alpha: float, factor: float) -> None:
    problem = Problem.mm(8, 8, 8, dtype=F32, device_type="cpu")
    bound = accumulation_bound(problem, claims_of(F32), alpha=alpha, extended=True)
    steps = 8 + 2 + 1 + 3
    assert bound.absolute == pytest.approx(factor * steps * underflow(F32, flush=False), rel=1e-5)


@pytest.mark.parametrize(("k", "exact"), [(4, True), (5, False)])
def test_integer_sums_within_the_claims_are_exact(k: int, exact: bool) -> None:
    problem, claims = Problem.mm(1, 1, k, dtype=F32, device_type="cpu"), claims_of(F32, accumulate=F16, partials=F16)
    assert exact_limit(problem, claims) == 1024
    x = torch.full((1, k), 16.0)
    operands = Operands(a=x, b=x.T, out=x, inp=None, extra=(), alpha=1, beta=0)
    expectation = referenced(problem, operands, name="integers", integers=True)
    finding = Judge(problem, claims).find(torch.full((1, 1), 256.0 * k + 0.25), expectation)
    assert bool(finding.state[0]) == exact


def test_relative_errors_compound() -> None:
    """Errors multiply instead of adding up: for sums in float16 the difference is large."""
    problem = Problem.mm(4, 4, 1024, dtype=F32, device_type="cpu")

    def relative(**claimed: object) -> float:
        return accumulation_bound(problem, claims_of(F32, **{"accumulate": F16, "partials": F16, **claimed}), alpha=1).relative

    plain = relative()
    assert plain > 0.5
    assert relative(input_mode="tf32") == pytest.approx((1 + plain) * (1 + 2.0**-10) ** 2 - 1, rel=1e-9)
    assert relative(partials=torch.bfloat16) == pytest.approx((1 + plain) * math.exp(2 * 2.0**-8) - 1, rel=1e-9)


@pytest.mark.parametrize("half", [1, 7, 64, 1000])
@pytest.mark.parametrize("limit", [2**7, 2**10, 2**13, 2**23])
def test_sums_that_cancel_stay_below_the_limit_with_zero_points_too(limit: int, half: int) -> None:
    problem = Problem.mixed_mm(8, 8, 32, dtype=F16, scales="column", zeros=True, device_type="cpu")
    most_a, most_b, density = cancelling_range(limit, half, problem)
    assert min(most_a, most_b) >= 1
    assert density * most_a * (most_b + 2 * MOST_ZERO) * half <= limit
    assert (density == 1) == (limit >= half * (1 + 2 * MOST_ZERO))


def test_wider_node_may_round_or_keep_its_result() -> None:
    """A sum that float32 holds and bfloat16 does not may be rounded or not."""
    nodes = (Node(op="acc", args=(), dtype=F32), Node(op="add", args=(Ref(0), 1.0), dtype=F32))
    acc = Approximate(value=torch.tensor([256.0], dtype=F64), error=torch.zeros(1, dtype=F64))
    for precision, open_ in ((torch.bfloat16, True), (F32, False)):
        got = propagate(Epilogue(nodes=nodes), acc, (), precision=precision, flush=False, reference_is_float64=False)
        assert bool(got.error > 0) == open_
        assert float((got.value - 257.0).abs()) <= float(got.error)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((5, 2, 3), ["0:2 0:2", "2:4 0:2", "4:5 0:2"]),
        ((3, 3, 4), ["0:1 0:3", "1:2 0:3", "2:3 0:3"]),
        ((2, 5, 4), ["0:1 0:3", "0:1 3:5", "1:2 0:3", "1:2 3:5"]),
        ((1, 2, 20), ["0:1 0:1", "0:1 1:2"]),
        ((3, 0, 4), ["0:3 0:0"]),
        ((0, 2, 3), []),
    ],
)
@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_results_are_compared_in_blocks_that_fit(
    shape: tuple[int, int, int], blocks: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "CHUNK_ELEMENTS", {"cpu": 12, "cuda": 0} if kind == "cpu" else {"cpu": 0, "cuda": 12})
    made = judging._blocks(shape, torch.device(kind))
    assert [f"{b.start}:{b.stop} {r.start}:{r.stop}" for b, r in made] == blocks


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_sums_of_a_sparse_product_are_bounded_by_the_blocks_of_each_column() -> None:
    sparsity = Sparsity(block_n=2, block_k=3, density=0.5)
    problem = Problem.bsr_mm(4, 6, 6, block=(2, 3), density=0.5, dtype=F32, device_type="cpu")
    mask = torch.tensor([[True, True], [False, True], [False, False]])
    weight = sparse_of(torch.ones(6, 6), mask, sparsity)
    a = torch.ones(4, 6)
    operands = Operands(a=a, b=weight.to_dense().t(), out=a, inp=None, extra=(), alpha=1, beta=0, weight=weight)
    claims = claims_of(F32)
    known = referenced(problem, operands, name="blocks")
    relative = {count: accumulation_bound(problem, claims, alpha=1, terms=count).relative for count in (0, 3, 6)}
    bound = known._bound_of_region(problem, claims, known.references[0])
    assert isinstance(bound.relative, torch.Tensor)
    assert bound.relative.tolist() == [relative[6]] * 2 + [relative[3]] * 2 + [relative[0]] * 2
    part = dataclasses.replace(known.references[0], region=Region(cols=torch.tensor([1, 4])))
    bound = known._bound_of_region(problem, claims, part)
    assert isinstance(bound.absolute, torch.Tensor)
    assert bound.absolute.tolist() == [accumulation_bound(problem, claims, alpha=1, terms=count).absolute for count in (6, 0)]


def test_bound_of_an_expectation_uses_alpha_and_factors_of_small_numbers() -> None:
    problem = Problem.addmm(1, 1, 2, dtype=F32, alpha=3, device_type="cpu")
    a, b = torch.tensor([[5.0, 1.0]]), torch.tensor([[2.0**-120], [1.0]])
    known = referenced(problem, Operands(a=a, b=b, out=a, inp=a, extra=(), alpha=3, beta=0), name="small")
    plain = claims_of(F32)

    def absolute(claims: Claims, **given: float) -> float:
        return float(known._bound(problem, claims, extended=True, **given).absolute)

    assert absolute(plain) == pytest.approx(3 * absolute(plain, alpha=1.0))
    assert absolute(plain, terms=2) == pytest.approx(absolute(plain, alpha=1.0))
    assert absolute(plain, terms=2, alpha=3.0) == pytest.approx(absolute(plain))
    least = torch.finfo(F32).smallest_normal
    flushed = {mode: absolute(claims_of(F32, flush_subnormals=True, input_mode=mode)) for mode in ("ieee", "parts")}
    assert flushed["ieee"] < 40 * least
    assert flushed["parts"] - flushed["ieee"] == pytest.approx(3 * 2 * 5 * least, rel=1e-4)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_errors_of_a_float64_epilogue_count_twice(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    epilogue = Epilogue(nodes=(Node(op="acc", args=(), dtype=dtype), Node(op="exp", args=(Ref(0),), dtype=dtype)))
    problem = dataclasses.replace(Problem.mm(1, 1, 2, dtype=dtype, device_type="cpu"), epilogue=epilogue)
    told: list[dict[str, object]] = []
    original = propagate
    monkeypatch.setattr(judging, "propagate", lambda *args, **words: told.append(words) or original(*args, **words))
    one = torch.ones(1, 1, 1, dtype=F64)
    Judge(problem, claims_of(dtype, flush_subnormals=True))._stored(Approximate(value=one, error=0 * one), ())
    assert told == [{"precision": dtype, "flush": True, "reference_is_float64": dtype == F64}]
