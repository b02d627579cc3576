"""The oracle on products that are known by a formula or by rational arithmetic: references, probes, bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from bound_cases import orders, scaled
from broken_kernels import CPU, Product, claims_of, one_by_one, rounding_blocks, split_k, tensor_core
from rational import Matrix, fractions, rational

from gemmtune.backends.aten.scaled import rows_on_this_cpu
from gemmtune.choice import Claims
from gemmtune.numerics.bounds import accumulation_bound, exact_limit, underflow
from gemmtune.numerics.expectation import OneHotExpectation, Referenced, referenced
from gemmtune.numerics.judging import Judge
from gemmtune.numerics.operands import Operands
from gemmtune.numerics.probes import Probes
from gemmtune.numerics.reference import Region, extended_reference, reference
from gemmtune.problem import Problem
from gemmtune.problem.dtypes import dtype_info

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
DTYPES = (F64, F32, F16, BF16, E4M3, E5M2, INT8)


def identity() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b = torch.arange(-12, 12).view(6, 4) % 9 - 4
    return torch.eye(6), b, b


def permutation() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order, b = torch.tensor([3, 0, 5, 1, 4, 2]), torch.arange(24).view(6, 4) % 7 - 3
    return torch.eye(6)[order], b, b[order]


def squares() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row i of a is 1 … i + 1, and zeros: 1² + … + n² = n(n + 1)(2n + 1) / 6."""
    k, n = torch.arange(1, 9), torch.arange(1, 9)
    return (
        torch.ones(8, 8).tril() * k,
        k[:, None] * torch.tensor([1, -1]),
        (n * (n + 1) * (2 * n + 1) // 6)[:, None] * torch.tensor([1, -1]),
    )


def many_squares() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for n = 120: more than float16 holds as a result."""
    k = torch.arange(1, 121)
    return k[None], k[:, None], torch.tensor([[120 * 121 * 241 // 6]])


def telescope() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x1 − x0) + (x2 − x1) + … = xn − x0."""
    x = torch.tensor([5, -3, 7, 2, -6, 1, 4, -7, 6, 3])
    b = torch.stack([x[1:], x[:-1]], dim=1).flatten()
    return torch.tensor([[1, -1] * 9, [2, -2] * 9]), b[:, None], torch.tensor([[-2], [-4]])


def geometric() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """1 + 1/2 + … + 2^-6 = 2 − 2^-6."""
    return torch.exp2(-torch.arange(7.0))[None], torch.ones(7, 3), torch.full((1, 3), 2 - 2.0**-6)


def pascal() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lower triangle of binomials; its inverse has the same with alternating signs."""
    binomial = torch.tensor([[math.comb(i, j) for j in range(6)] for i in range(6)])
    signs = (-1) ** (torch.arange(6)[:, None] + torch.arange(6))
    return binomial, binomial * signs, torch.eye(6)


def hilbert() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """60 · H and the inverse of the 3 × 3 Hilbert matrix H, both of integers."""
    h = torch.tensor([[60 // (i + j + 1) for j in range(3)] for i in range(3)])
    return h, torch.tensor([[9, -36, 30], [-36, 192, -180], [30, -180, 180]]), 60 * torch.eye(3)


def large_hilbert() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for 7 × 7: sums of numbers near 2^46 that cancel down to 0 and 360360."""
    n = 7

    def inverse(i: int, j: int) -> int:
        sides = math.comb(n + i - 1, n - j) * math.comb(n + j - 1, n - i)
        return (-1) ** (i + j) * (i + j - 1) * sides * math.comb(i + j - 2, i - 1) ** 2

    h = torch.tensor([[360360 // (i + j - 1) for j in range(1, n + 1)] for i in range(1, n + 1)])
    b = torch.tensor([[inverse(i, j) for j in range(1, n + 1)] for i in range(1, n + 1)])
    return h, b, 360360 * torch.eye(n)


KNOWN = {f.__name__: f() for f in (
    identity, permutation, squares, many_squares, telescope, geometric, pascal, hilbert, large_hilbert,
)}  # fmt: skip


def holds(dtype: torch.dtype, *tensors: torch.Tensor) -> bool:
    return all(torch.equal(x.double().to(dtype).double(), x.double()) for x in tensors)


CASES = [(name, dtype) for name, (a, b, _) in KNOWN.items() for dtype in DTYPES if holds(dtype, a, b)]


def operands_of(a: torch.Tensor, b: torch.Tensor, **fields: torch.Tensor) -> Operands:
    return Operands(a=a, b=b, out=torch.empty(0), inp=None, extra=(), alpha=1, beta=0, **fields)  # type: ignore[arg-type]


def problem_of(dtype: torch.dtype, m: int, n: int, k: int) -> Problem:
    if dtype == INT8:
        return Problem.int_mm(m, n, k, device_type="cpu")
    if dtype in (E4M3, E5M2):
        return Problem.scaled_mm(m, n, k, dtype=dtype, out_dtype=F32, device_type="cpu")
    return Problem.mm(m, n, k, dtype=dtype, device_type="cpu")


def strict_claims(problem: Problem) -> Claims:
    return claims_of(problem.dtype, accumulate=problem.accumulator, partials=problem.accumulator, splits=4)


def test_every_dtype_has_several_known_products() -> None:
    assert all(sum(d == dtype for _, d in CASES) >= 5 for dtype in DTYPES)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_references_match_the_formula(name: str, dtype: torch.dtype) -> None:
    a, b, exact = KNOWN[name]
    operands = operands_of(a.to(dtype), b.to(dtype))
    (m, k), n = a.shape, b.shape[1]
    plain, extended = reference(operands, Region()), extended_reference(operands, 1, m, n, k)
    assert torch.equal(plain.value[0], exact.double())
    assert torch.equal(extended.value[0], exact.double())
    above = rational(a.abs(), b.abs())
    assert fractions(plain.magnitude[0]) == fractions(extended.magnitude[0]) == above


def test_extended_reference_is_more_precise_than_float64() -> None:
    operands = operands_of(torch.tensor([[2.0**50, 1, 2.0**-40, -(2.0**50)]], dtype=F64), torch.ones(4, 1, dtype=F64))
    assert extended_reference(operands, 1, 1, 1, 4).value.item() == 1 + 2.0**-40
    assert reference(operands, Region()).value.item() == 1


def test_scales_multiply_rows_and_columns() -> None:
    a, b, exact = KNOWN["squares"]
    scale_a, scale_b = torch.arange(1.0, 9).view(8, 1) / 8, torch.tensor([[3.0, -0.1]])
    operands = operands_of(a.to(E5M2), b.to(E5M2), scale_a=scale_a, scale_b=scale_b)
    for region in (Region(), Region(rows=torch.tensor([1, 6])), Region(cols=torch.tensor([1]))):
        result = reference(operands, region)
        expected = region.of(exact.double() * scale_a.double() * scale_b.double())
        assert torch.allclose(result.value[0], expected, rtol=2.0**-52, atol=0)
        assert torch.allclose(result.magnitude[0], expected.abs(), rtol=2.0**-52, atol=0)
    per_tensor = operands_of(a.to(E5M2), b.to(E5M2), scale_a=torch.tensor(2.0), scale_b=torch.tensor([[0.25]]))
    assert torch.equal(reference(per_tensor, Region()).value[0], exact.double() / 2)


def assert_error_allowed(problem: Problem, claims: Claims, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Fails if some element is further from the rational product than bound and last rounding allow."""
    bound = accumulation_bound(problem, claims, alpha=1, extended=True)
    info = dtype_info(problem.out.dtype)
    relative, absolute = Fraction(bound.relative), Fraction(bound.absolute)
    u, eta = Fraction(info.unit_roundoff), Fraction(underflow(info.dtype, flush=False))
    exact, above = rational(a, b), rational(a.double().abs(), b.double().abs())
    for got_row, exact_row, above_row in zip(fractions(out), exact, above, strict=True):
        for got, right, most in zip(got_row, exact_row, above_row, strict=True):
            error = relative * most + absolute
            assert abs(got - right) <= error + u * (abs(right) + error) + eta


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_is_never_below_the_true_error(dtype: torch.dtype) -> None:
    problem = problem_of(dtype, 4, 5, 61)
    claims, probes = strict_claims(problem), Probes(problem, CPU)
    data = [("normal", "normal"), ("uniform", "uniform"), ("wide", "normal"), ("cancelling", "cancelling"), ("cancelling", "ones")]
    for fills in data:
        operands = probes.filled(*fills)
        a, b = (x.to(problem.accumulator) for x in (operands.a, operands.b))
        for product in orders(problem.accumulator).values():
            assert_error_allowed(problem, claims, product(a, b).to(problem.out.dtype), operands.a, operands.b)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_known_products_are_accepted_and_others_are_not(name: str, dtype: torch.dtype) -> None:
    a, b, exact = KNOWN[name]
    problem = problem_of(dtype, a.shape[0], b.shape[1], a.shape[1])
    claims = strict_claims(problem)
    operands = operands_of(a.to(dtype), b.to(dtype))
    known = reference(operands, Region())
    bound = accumulation_bound(problem, claims, alpha=1)

    def rejected(out: torch.Tensor) -> bool:
        return bool(Judge(problem, claims).find(out, Referenced(name=name, operands=operands, references=(known,))).state[0])

    for product in orders(problem.accumulator).values():
        assert not rejected(product(a.to(problem.accumulator), b.to(problem.accumulator)).to(problem.out.dtype))
    off = 8 * (bound(known.magnitude[0]) + dtype_info(problem.out.dtype).unit_roundoff * exact.abs()) + 1e-3
    wrong = (exact.double() + (off.ceil() if dtype == INT8 else off)).to(problem.out.dtype)
    assert rejected(torch.where(wrong.isinf(), 0, wrong))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_probes_match_rational_arithmetic(dtype: torch.dtype) -> None:
    problem = problem_of(dtype, 6, 5, 19)
    probes, limit = Probes(problem, CPU), exact_limit(problem, strict_claims(problem))
    random = probes.random()
    picks = [probes.cancel(limit), probes.width(limit), probes.rows_of_b(random.b), probes.cols_of_a(random.a), probes.both(random)]
    for pick in picks:
        x = pick.operands
        exact: Matrix = rational(*(t.double().nan_to_num(0, 0, 0) for t in (x.a, x.b)))
        scale = Fraction(1) if x.scale_a is None or x.scale_b is None else Fraction(x.scale_a.item()) * Fraction(x.scale_b.item())
        held = pick.exact(slice(0, 1), slice(0, 6), problem.accumulator)[0]
        assert held.dtype == problem.accumulator
        compared = held.isfinite() & x.a.double().isfinite().all(dim=1, keepdim=True) & x.b.double().isfinite().all(dim=0)
        assert compared.any()
        for i, j in compared.nonzero().tolist():
            assert Fraction(held[i, j].item()) == exact[i][j] * scale, (pick.name, i, j)


def passes_width(problem: Problem, claims: Claims, product: Product) -> bool:
    pick = Probes(problem, CPU).width(exact_limit(problem, claims))
    wide = problem.accumulator
    acc = product(pick.operands.a.to(wide), pick.operands.b.to(wide))
    return not Judge(problem, claims).find(scaled(acc, pick.operands, problem.out.dtype), OneHotExpectation.of(pick)).state[0]


@pytest.mark.parametrize("k", [3, 33, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_kernels_of_any_order_pass_the_width_probe(dtype: torch.dtype, k: int) -> None:
    problem = problem_of(dtype, 20, 7, k)
    for order, product in orders(problem.accumulator).items():
        assert passes_width(problem, strict_claims(problem), product), order


@pytest.mark.parametrize("k", [33, 400])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, E5M2], ids=str)
def test_the_width_probe_finds_accumulators_and_partials_that_are_too_narrow(dtype: torch.dtype, k: int) -> None:
    problem = problem_of(dtype, 20, 7, k)
    claims = strict_claims(problem)
    narrow = {
        "float16 accumulator": rounding_blocks(F16), "bfloat16 accumulator": rounding_blocks(BF16),
        "22 bits": tensor_core(22, width=4), "14 bits": tensor_core(14), "14 bits promoted": tensor_core(14, promoted_every=128),
        "float16 partials": split_k(F16, 2), "bfloat16 partials": split_k(BF16, 4),
    }  # fmt: skip
    for name, product in narrow.items():
        assert not passes_width(problem, claims, product), name
    assert passes_width(problem, claims, tensor_core(24))


def test_declared_narrow_accumulators_pass_the_width_probe() -> None:
    declared = [
        (problem_of(F16, 20, 7, 500), claims_of(F16, accumulate=F16, partials=F16), one_by_one_in(F16)),
        (problem_of(F16, 20, 7, 500), claims_of(F16, accumulator_bits=18), tensor_core(18)),
        (problem_of(BF16, 20, 7, 500), claims_of(BF16, partials=BF16, splits=4), split_k(BF16, 4)),
        (Problem.scaled_mm(20, 7, 500, device_type="cuda"), claims_of(E4M3), tensor_core(14)),
        (Problem.scaled_mm(20, 7, 500, dtype=E5M2, device_type="cuda"), claims_of(E5M2), tensor_core(14, promoted_every=128)),
    ]
    for problem, claims, product in declared:
        assert passes_width(problem, claims, product), problem


def one_by_one_in(dtype: torch.dtype) -> Product:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return one_by_one(a.to(dtype), b.to(dtype)).to(a.dtype)

    return product


def test_int8_sums_in_float32_fail_the_width_probe_where_they_can_be_inexact() -> None:
    problem = problem_of(INT8, 5, 4, 8000)
    claims = strict_claims(problem)

    def in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return one_by_one(a.float(), b.float())

    assert passes_width(problem, claims, torch.matmul)
    assert not passes_width(problem, claims, in_float32)
    assert passes_width(problem, claims_of(INT8), in_float32)


def test_torch_8_bit_products_are_within_the_bound() -> None:
    scales = "row" if rows_on_this_cpu() else "tensor"
    for problem in (Problem.int_mm(33, 32, 64, device_type="cpu"), Problem.scaled_mm(32, 48, 64, scales=scales, device_type="cpu")):
        probes, claims = Probes(problem, CPU), strict_claims(problem)
        random = probes.random()
        picks = (probes.cancel(2**13), probes.width(2**13), probes.rows_of_b(random.b), probes.cols_of_a(random.a))
        for expectation in (*map(OneHotExpectation.of, picks), referenced(problem, random, name="random")):
            finding = Judge(problem, claims).find(by_torch(problem, expectation.operands), expectation)
            assert not finding.state[0], expectation.name


def by_torch(problem: Problem, x: Operands) -> torch.Tensor:
    if problem.op == "int_mm":
        return torch._int_mm(x.a, x.b)
    return torch._scaled_mm(x.a, x.b, x.scale_a, x.scale_b, out_dtype=problem.out.dtype)
