"""The oracle for the quantized operations: what stored numbers mean, exact references, and bounds against rational arithmetic."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch
from bound_cases import orders
from broken_kernels import CPU, claims_of, spread_out, tensor_core
from quantized_kernels import on_sums, on_terms, terms, unpacked
from rational import fractions, rational
from rotation import rotated

from gemmtune.choice import Claims
from gemmtune.errors import GemmtuneError
from gemmtune.numerics import reference as module
from gemmtune.numerics.bounds import accumulation_bound, epilogue_input, exact_limit, underflow
from gemmtune.numerics.expectation import OneHotExpectation
from gemmtune.numerics.operands import Operands, random_operands, scale_factor, weight_unit
from gemmtune.numerics.probes import Probes
from gemmtune.numerics.quantized import blocks_of_k, gathered_numbers, number_range, numbers, packed, scale_at, scales_along_k
from gemmtune.numerics.reference import Region, reference
from gemmtune.numerics.scaling import Scaling, exact_scaling, random_scaling
from gemmtune.problem import Layout, Problem
from gemmtune.problem.dtypes import dtype_info
from gemmtune.problem.trace import trace

F32, F16, BF16, INT8, UINT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Exact = list[list[Fraction]]


def mixed(scales: Any = "group_32", *, m: int = 4, n: int = 5, k: int = 70, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, scales=scales, device_type="cpu", **fields)


def scaled(scales: Any, *, m: int = 4, n: int = 5, k: int = 300, **fields: Any) -> Problem:
    return Problem.scaled_mm(m, n, k, scales=scales, **({"device_type": "cpu", "out_dtype": F32} | fields))


WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {}, "uint8": {"dtype_b": UINT8}, "e4m3": {"dtype_b": E4M3}, "e5m2": {"dtype_b": E5M2},
    "int4": {"encoding": "int4"}, "uint4": {"encoding": "uint4"},
}  # fmt: skip
PROBLEMS = {
    **{f"{name} {zeros}": mixed(zeros=zeros, **fields) for name, fields in WEIGHTS.items() for zeros in (False, True)},
    "column bf16": mixed("column", dtype=BF16, zeros=True),
    "tensor f32": mixed("tensor", dtype=F32, zeros=True, scale_dtype=F32),
    "f32 scales": mixed("group_64", zeros=True, encoding="uint4", scale_dtype=F32),
    "no scales": mixed("none", dtype=BF16),
    "rows": scaled("row"),
    "blocks of 128": scaled("block_1x128"),
    "square blocks": scaled("block_128x128", m=129, n=3, k=140),
}  # fmt: skip


def in_rational_arithmetic(problem: Problem, x: Operands) -> tuple[Exact, Exact]:
    """(the product, S) of the operands as they are."""
    scale_a, scale_b, zero_b = (fractions(t) for t in terms(problem, x.scales))
    a, b = fractions(x.a), fractions(unpacked(x.b, problem.encoding))
    left = [[v * s for v, s in zip(*pair, strict=True)] for pair in zip(a, scale_a, strict=True)]
    right = [[(v - z) * s for v, z, s in zip(*row, strict=True)] for row in zip(b, zero_b, scale_b, strict=True)]
    above = [[(abs(v) + abs(z)) * s for v, z, s in zip(*row, strict=True)] for row in zip(b, zero_b, scale_b, strict=True)]
    positive = [[abs(v) for v in row] for row in left]
    return product(left, right), product(positive, above)


def product(a: Exact, b: Exact) -> Exact:
    return [[sum((x * y for x, y in zip(row, col, strict=True)), Fraction(0)) for col in zip(*b, strict=True)] for row in a]


# What is stored


def test_the_even_row_has_the_low_four_bits() -> None:
    stored = torch.tensor([[0x21, 0xF8], [0x70, 0x9A]], dtype=UINT8)
    assert numbers(stored, "uint4").tolist() == [[1, 8], [2, 15], [0, 10], [7, 9]]
    assert numbers(stored, "int4").tolist() == [[1, -8], [2, -1], [0, -6], [7, -7]]
    assert numbers(stored, "") is stored


@pytest.mark.parametrize("encoding", ["int4", "uint4"])
def test_packing_and_picking_agree_with_unpacking(encoding: Any) -> None:
    stored = torch.arange(256, dtype=UINT8).view(32, 8)
    everything = numbers(stored, encoding)
    low, high = number_range(mixed(encoding=encoding))
    assert (everything.min(), everything.max()) == (low, high)
    assert torch.equal(everything.short(), unpacked(stored, encoding))
    assert torch.equal(packed(everything), stored)
    index = torch.tensor([0, 63, 31, 32, 7])
    assert torch.equal(gathered_numbers(stored, encoding, index), everything[index])


SOME = rotated(list(PROBLEMS), 4, "numerics quantized")
on_some = pytest.mark.parametrize("problem", [PROBLEMS[name] for name in SOME], ids=SOME)


@on_some
def test_every_element_has_the_scale_of_its_block(problem: Problem) -> None:
    x = random_operands(problem, CPU, seed=3)
    expected = dict(zip(("scale_a", "scale_b", "zero_b"), terms(problem, x.scales), strict=True))
    for name, full in expected.items():
        scale = getattr(x, name)
        if scale is not None:
            rows, cols = (torch.arange(count) for count in full.shape)
            assert torch.equal(scale_at(scale, tuple(full.shape), rows.unsqueeze(-1), cols).expand(full.shape), full)


def test_blocks_along_k() -> None:
    assert [blocks_of_k(mixed(s, k=130)) for s in ("none", "column", "group_128", "group_64", "group_32")] == [1, 1, 2, 3, 5]
    assert blocks_of_k(mixed("group_32", k=0)) == 1
    assert [scales_along_k(scaled(s)) for s in ("tensor", "row", "block_1x128", "block_128x128")] == [0, 0, 2, 2]
    assert scales_along_k(mixed(zeros=True)) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [("int8", (-128, 127)), ("uint8", (0, 255)), ("e4m3", (-16, 16)), ("e5m2", (-8, 8)), ("int4", (-8, 7)), ("uint4", (0, 15))],
)
def test_integers_that_weights_can_be(name: str, expected: tuple[int, int]) -> None:
    assert number_range(mixed(**WEIGHTS[name])) == expected


def test_neighbouring_scales_of_exact_probes_differ() -> None:
    problem, generator = scaled("block_1x128", m=40, n=50, k=1280), torch.Generator().manual_seed(1)
    for separable, legal in ((False, {1, 2, 4}), (True, {0.25, 0.5, 1, 2, 4})):
        made = exact_scaling(problem, generator, CPU, separable=separable)
        for scale in (made.scale_a, made.scale_b):
            assert scale is not None
            assert set(scale.unique().tolist()) == legal
            for dim in (0, 1):
                assert (scale.diff(dim=dim) != 0).all()
    only = exact_scaling(scaled("tensor"), generator, CPU)
    assert [x.tolist() for x in (only.scale_a, only.scale_b) if x is not None] == [2, 2]
    single = exact_scaling(scaled("row", m=1), generator, CPU).scale_a
    assert single is not None
    assert single.tolist() == [[2]]


def test_undo_cancels_scales_along_k() -> None:
    problem = scaled("block_1x128", m=2, n=2, k=300)
    scale_a, scale_b = torch.tensor([[1.0, 2, 4], [2, 4, 8]]), torch.tensor([[4.0, 8], [4, 8], [1, 2]])
    undo = Scaling(scale_a=scale_a, scale_b=scale_b).undo(problem, CPU)
    assert undo is not None
    assert undo.shape == (300,)
    assert [undo[k].item() for k in (0, 127, 128, 255, 256, 299)] == [1, 1, 0.5, 0.5, 1, 1]
    only_a = Scaling(scale_a=scale_a).undo(problem, CPU)
    assert only_a is not None
    assert [only_a[k].item() for k in (0, 128, 256)] == [1, 0.5, 0.25]
    assert Scaling(scale_a=torch.ones(2, 1), scale_b=torch.ones(1, 2)).undo(scaled("row", m=2, n=2), CPU) is None
    assert Scaling().undo(problem, CPU) is None


@pytest.mark.parametrize(("name", "low", "high"), [("int8", -32.375, 31.375), ("uint4", 5.625, 9.375), ("e5m2", -2, 2)])
def test_random_zero_points_lie_around_the_middle(name: str, low: float, high: float) -> None:
    zero = random_scaling(
        mixed("column", n=4000, zeros=True, dtype=F32, **WEIGHTS[name]), torch.Generator().manual_seed(1), CPU
    ).zero_b
    assert zero is not None
    room = (high - low) / 100
    assert low - 0.01 <= float(zero.min()) < low + room
    assert high - room < float(zero.max()) <= high + 0.01


# References


@on_some
def test_references_are_the_rational_product(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    x = Probes(problem, CPU).random()
    exact, above = in_rational_arithmetic(problem, x)
    regions = (Region(), Region(rows=torch.tensor([1, problem.m - 1])), Region(cols=torch.tensor([0, 2])))
    for budget in (2**28, 8 * problem.k * 3):
        monkeypatch.setattr(module, "TEMPORARY_BYTES", budget)
        for region in regions:
            got = reference(x, region)
            rows = range(problem.m) if region.rows is None else region.rows.tolist()
            cols = range(problem.n) if region.cols is None else region.cols.tolist()
            for i, row in enumerate(rows):
                for j, col in enumerate(cols):
                    allowed = (problem.k + 3) * Fraction(1, 2**53) * above[row][col]
                    assert abs(Fraction(got.value[0, i, j].item()) - exact[row][col]) <= allowed
                    assert abs(Fraction(got.magnitude[0, i, j].item()) - above[row][col]) <= allowed


@pytest.mark.parametrize("problem", [mixed(k=0, zeros=True), mixed(k=0, encoding="int4"), scaled("block_1x128", k=0)], ids=str)
def test_an_empty_sum_is_0(problem: Problem) -> None:
    got = reference(Probes(problem, CPU).random(), Region())
    assert not got.value.any()
    assert not got.magnitude.any()


def test_scales_that_change_along_k_are_no_factor_of_the_result() -> None:
    with pytest.raises(GemmtuneError, match=r"scales: got shapes \[4, 3\] and \[3, 5\], expected none that changes along K"):
        scale_factor(random_operands(scaled("block_1x128"), CPU, seed=1))
    for one in ("scale_a", "scale_b"):
        operands = random_operands(scaled("block_1x128"), CPU, seed=1)
        with pytest.raises(GemmtuneError, match="expected none that changes along K"):
            scale_factor(dataclasses.replace(operands, **{one: torch.ones(1, 1)}))


def test_random_weights_are_near_one() -> None:
    units = [weight_unit(p) for p in (mixed("column"), scaled("tensor"), mixed("column", dtype_b=E4M3))]
    assert units == [2.0**-6, 1.0, 1.0]
    assert weight_unit(mixed("column", encoding="int4")) == 0.25


# Operands


@pytest.mark.parametrize("name", WEIGHTS)
def test_random_operands_have_scales_zero_points_and_every_integer(name: str) -> None:
    problem = mixed("group_32", zeros=True, n=64, k=256, **WEIGHTS[name])
    for x in (random_operands(problem, CPU, seed=1), Probes(problem, CPU).random()):
        assert x.scale_b is not None
        assert x.zero_b is not None
        assert (Layout.of(x.scale_b), Layout.of(x.zero_b)) == (problem.scale_b, problem.zero_b)
        assert x.tensors[2:] == x.scales == (x.scale_b, x.zero_b)
        found = numbers(x.b, x.encoding).double()
        assert found.isfinite().all()
        if not name.startswith("e"):
            assert (found.min(), found.max()) == number_range(problem)
        assert (x.scale_b > 0).all()
        assert len(x.zero_b.unique()) > 4


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_weight_is_finite_and_most_magnitudes_are_there(dtype: torch.dtype) -> None:
    probes = Probes(mixed("none", dtype_b=dtype, n=64, k=256), CPU)
    b = probes.every_weight(probes.random().b)
    bits = b.contiguous().view(UINT8)
    assert b.float().isfinite().all()
    assert len((bits % 128).unique()) > 100
    assert (bits >= 128).float().mean() == pytest.approx(0.5, abs=0.05)
    assert 4 * b.float().abs().max() < torch.finfo(F16).max
    integers = Probes(mixed(dtype_b=dtype, zeros=True), CPU)
    plain = integers.random().b
    assert integers.every_weight(plain) is plain
    assert torch.equal(plain.float(), plain.float().round())


def test_neighbouring_blocks_have_different_powers_of_two() -> None:
    problem = scaled("block_1x128", m=20, n=30, k=128 * 9)
    for separable in (False, True):
        made = exact_scaling(problem, torch.Generator().manual_seed(1), CPU, separable=separable)
        for scale in (made.scale_a, made.scale_b):
            assert scale is not None
            assert (torch.frexp(scale).mantissa == 0.5).all()
            assert (scale[1:] != scale[:-1]).all()
            assert (scale[:, 1:] != scale[:, :-1]).all()
            ratios = scale[1:] / scale[:-1]
            assert bool((ratios == ratios[:, :1]).all()) == separable
        undone = made.undo(problem, CPU)
        assert undone is not None
    assert made.scale_a is not None
    assert made.scale_b is not None
    total = made.scale_a.double().repeat_interleave(128, 1) * made.scale_b[:, 3].double().repeat_interleave(128) * undone
    assert (total == total[:, :1]).all()


def test_a_single_scale_is_not_1() -> None:
    made = exact_scaling(mixed("tensor", zeros=True), torch.Generator(), CPU, zeros=(-3, 3), zero_step=0.25)
    assert made.scale_b == 2
    assert made.zero_b is not None
    assert (made.zero_b * 4 % 1 == 0).all()
    assert made.undo(mixed("tensor"), CPU) is None


# Bounds


def worst(
    problem: Problem, claims: Claims, out: torch.Tensor, x: Operands, known: tuple[Exact, Exact] | None = None, **fields: Any
) -> Fraction:
    """The largest true error over what bound and last rounding allow. ``known`` is ``in_rational_arithmetic`` of ``x``."""
    bound = accumulation_bound(problem, claims, alpha=1, largest=x.beside_subnormal, extended=True, **fields)
    info = dtype_info(problem.out.dtype)
    u, eta = Fraction(info.unit_roundoff), Fraction(underflow(info.dtype, flush=False))
    exact, above = known or in_rational_arithmetic(problem, x)
    most = Fraction(0)
    for got_row, exact_row, above_row in zip(fractions(out), exact, above, strict=True):
        for got, right, s in zip(got_row, exact_row, above_row, strict=True):
            error = Fraction(bound.relative) * s + Fraction(bound.absolute)
            most = max(most, abs(got - right) / (error + u * (abs(right) + error) + eta))
    return most


def run(kernel: Any, problem: Problem, x: Operands) -> torch.Tensor:
    out = torch.empty(problem.m, problem.n, dtype=problem.out.dtype)
    kernel(out, *spread_out(problem, x.tensors, x.scalars))
    return out


@on_some
def test_the_bound_is_never_below_the_true_error(problem: Problem) -> None:
    x, claims = Probes(problem, CPU).random(), claims_of(problem.dtype, splits=4)
    known = in_rational_arithmetic(problem, x)
    group = {"mixed_mm": 32, "scaled_mm": 128}[problem.op]
    for product in orders(F32).values():
        for kernel in (*(on_sums(problem, product, steps=steps) for steps in (group, group // 2)), on_terms(problem, product)):
            assert worst(problem, claims, run(kernel, problem, x), x, known) <= 1


@pytest.mark.parametrize("name", [name for name, p in PROBLEMS.items() if p.scale_b is not None and p.op == "mixed_mm"])
def test_declared_rounding_of_weights_is_allowed_for(name: str) -> None:
    problem = PROBLEMS[name]
    x = Probes(problem, CPU).random()
    claims = claims_of(problem.dtype, splits=4, weights=problem.dtype)
    for tiny in (1.0, 2.0**-13):
        small = dataclasses.replace(x, scale_b=x.scale_b * tiny)
        known = in_rational_arithmetic(problem, small)
        for kernel in (on_terms(problem, weights=problem.dtype), rounded_twice(problem), on_sums(problem, steps=32)):
            assert worst(problem, claims, run(kernel, problem, small), small, known) <= 1


def rounded_twice(problem: Problem) -> Any:
    """b − zero_b and its product with scale_b each rounded to a's dtype, with zero_b as it is."""

    def kernel(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: Any, alpha: float, beta: float, extra: Any) -> None:
        _, scale, zero = terms(problem, extra)
        weights = ((unpacked(b, problem.encoding).double() - zero).to(a.dtype).double() * scale).to(a.dtype)
        out.copy_(a.float() @ weights.float())

    return kernel


@pytest.mark.parametrize("fast_accum", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("scales", ["row", "block_1x128", "block_128x128"])
def test_the_14_bits_of_tensor_cores_are_allowed_for(scales: Any, fast_accum: bool) -> None:
    problem = scaled(scales, device_type="cuda", fast_accum=fast_accum)
    x = Probes(problem, CPU).filled("uniform", "uniform")
    assert worst(problem, claims_of(E4M3), run(on_sums(problem, tensor_core(14), steps=128), problem, x), x) <= 1


def test_one_product_is_bounded_by_a_few_roundings() -> None:
    problem = mixed(k=1024, zeros=True, dtype=F32, scale_dtype=F32)
    pick = Probes(problem, CPU).rows_of_b(Probes(problem, CPU).random().b, scaled=True)
    x = pick.operands
    expected, magnitude = pick.exact(slice(0, 1), slice(0, 4), torch.float64)[0], pick.magnitude(slice(0, 1), slice(0, 4))[0]
    exact, above = in_rational_arithmetic(problem, x)
    for i in range(4):
        for j in range(5):
            assert abs(Fraction(expected[i, j].item()) - exact[i][j]) <= Fraction(4, 2**53) * above[i][j]
            assert abs(Fraction(magnitude[i, j].item()) - above[i][j]) <= Fraction(4, 2**53) * above[i][j]
    assert worst(problem, claims_of(F32), run(on_sums(problem, steps=32), problem, x), x, terms=1) <= 1
    narrowed = dataclasses.replace(x, scale_b=x.scale_b.bfloat16().float())
    assert worst(problem, claims_of(F32), run(on_sums(problem, steps=32), problem, narrowed), x, terms=1) > 10
    bound = accumulation_bound(problem, claims_of(F32), alpha=1, terms=1, extended=True)
    assert bound.relative < 2.0**-15
    (part,) = OneHotExpectation.of(pick, scaled=True).parts(problem, claims_of(F32))
    allowed = part.sums(slice(0, 1), slice(0, 4)).error
    assert (allowed <= bound(pick.magnitude(slice(0, 1), slice(0, 4))) * (1 + 1e-9)).all()


def relative(problem: Problem, **claimed: Any) -> float:
    return accumulation_bound(problem, claims_of(problem.dtype, **claimed), alpha=1, extended=True).relative


def test_formula() -> None:
    assert relative(mixed("none", k=256)) == pytest.approx((256 + 64 + 4) * 2**-24, rel=1e-3)
    assert relative(mixed("column", k=256)) == pytest.approx((256 + 64 + 4) * 2**-24, rel=1e-3)
    assert relative(mixed("group_32", k=256)) == pytest.approx((256 + 64 + 4 + 9) * 2**-24, rel=1e-3)
    declared = relative(mixed("group_32", k=256), weights=F16)
    assert declared == pytest.approx(2 * 2**-11 + relative(mixed("group_32", k=256)), rel=1e-2)
    assert relative(mixed("none", k=256), weights=F16) == relative(mixed("none", k=256))
    on_gpu = Problem.mixed_mm(4, 5, 256, device_type="cuda")
    assert relative(on_gpu) == pytest.approx(324 * 2**-23, rel=1e-3)
    blocks = scaled("block_1x128", k=4096, device_type="cuda")
    assert relative(blocks) == pytest.approx((128 + 32) * 2**-13 + (32 + 4 + 33) * 2**-23, rel=2e-2)


def test_small_weights_that_are_rounded_count_absolutely() -> None:
    problem, tiny = mixed("tensor", k=256), claims_of(F16, weights=F16)
    bound = accumulation_bound(problem, tiny, alpha=1, largest=lambda: 3.0)
    assert bound.absolute == pytest.approx(256 * 3 * 2**-25 * 2, rel=1e-2)
    x = random_operands(problem, CPU, seed=1)
    assert x.beside_subnormal() == x.a.abs().max()
    assert random_operands(mixed("none"), CPU, seed=1).beside_subnormal() == 0


def test_sums_of_integers_are_rounded_once_before_an_epilogue() -> None:
    plain = Problem.int_mm(4, 5, 70, device_type="cpu")
    problem = dataclasses.replace(
        plain, epilogue=trace(lambda acc, s: acc * s, F32, [torch.ones(5)]), out=dataclasses.replace(plain.out, dtype=F32)
    )
    for claimed in (F32, torch.int32):
        claims = claims_of(INT8, accumulate=torch.int32, partials=torch.int32, epilogue_input=claimed)
        assert epilogue_input(problem, claims) == F32
        bound = accumulation_bound(problem, claims, alpha=1)
        assert bound.relative == 2.0**-24
        assert exact_limit(problem, claims) == 2**30 - 1
    assert epilogue_input(plain, claims_of(INT8, epilogue_input=torch.int32)) == torch.int32


@on_some
@pytest.mark.parametrize("limit", [2**23, 2**13, 2**10, 2**7])
def test_no_sum_of_a_cancelling_probe_exceeds_the_limit(problem: Problem, limit: int) -> None:
    x = Probes(problem, CPU).cancel(limit).operands
    scale_a, scale_b, zero_b = terms(problem, x.scales)
    b = unpacked(x.b, problem.encoding).double()
    sums = (x.a.double().abs() * scale_a) @ ((b.abs() + zero_b.abs()) * scale_b)
    assert (sums / (scale_a[:, :1] * scale_b[:1])).max() <= 2.1 * limit


@on_some
def test_exact_probes_match_rational_arithmetic(problem: Problem) -> None:
    probes = Probes(problem, CPU)
    random = probes.random()
    limit = exact_limit(problem, claims_of(problem.dtype))
    picks = [
        probes.cancel(limit), probes.width(limit), probes.rows_of_b(random.b, special=False),
        probes.cols_of_a(random.a, special=False), probes.both(random),
    ]  # fmt: skip
    for pick in picks:
        x = pick.operands
        clean = dataclasses.replace(x, a=x.a.double().nan_to_num(0, 0, 0), b=x.b)
        exact, _ = in_rational_arithmetic(problem, clean)
        held = pick.exact(slice(0, 1), slice(0, problem.m), problem.accumulator)[0]
        finite = x.a.double().isfinite().all(dim=1)
        assert finite.any()
        for i in finite.nonzero().flatten().tolist():
            assert [Fraction(v) for v in held[i].tolist()] == exact[i], pick.name


def test_rational_reference_matches_plain_products() -> None:
    problem = mixed("none")
    x = Probes(problem, CPU).random()
    assert in_rational_arithmetic(problem, x)[0] == rational(x.a, x.b)
