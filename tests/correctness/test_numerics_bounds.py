"""The error bound: no right kernel exceeds it on any data, and it is no wider than its formula says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from bound_cases import orders, ratio
from broken_kernels import claims_of, one_by_one, pairwise, rounding_blocks, split_k, tf32

from gemmtune.choice import Claims
from gemmtune.errors import GemmtuneError
from gemmtune.numerics.bounds import accumulation_bound, exact_limit
from gemmtune.numerics.operands import Operands
from gemmtune.numerics.routed import by_steps
from gemmtune.problem import Problem

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
M, N, K = 9, 11, 300


def normal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=F64)


def uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=F64)


def wide_range(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return normal(shape, generator) * torch.exp2(torch.randint(-12, 6, shape, generator=generator).double())


def subnormal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Numbers whose products with each other are subnormal, and half of them subnormal themselves in float16."""
    return normal(shape, generator) * 2.0**-14


def tiny(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Subnormal in bfloat16 and float32, zero in float16."""
    return normal(shape, generator) * 2.0**-130


def cancelling(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Each half of K is the other one's opposite but for the last bits: with a b of ones (see below) almost nothing is left."""
    x = normal(shape, generator)
    half = shape[1] // 2
    x[:, half : 2 * half] = -x[:, :half] * (1 + 2.0**-7 * torch.rand(shape[0], half, generator=generator, dtype=F64))
    return x


DATA: dict[str, Callable[[tuple[int, int], torch.Generator], torch.Tensor]] = {
    "normal": normal, "uniform": uniform, "wide range": wide_range, "subnormal": subnormal, "tiny": tiny, "cancelling": cancelling,
}  # fmt: skip
ORDERS = orders(F32)


def made(data: str, dtype: torch.dtype, seed: int, alpha: float = 1, beta: float = 0) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    a = DATA[data]((M, K), generator).to(dtype)
    b = torch.ones(K, N, dtype=dtype) if data == "cancelling" else DATA[data]((N, K), generator).T.to(dtype)
    inp = DATA[data]((M, N), generator).to(dtype) if beta else None
    return Operands(a=a, b=b, out=torch.empty(0), inp=inp, extra=(), alpha=alpha, beta=beta)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_right_float32_sums_of_any_order_stay_within(dtype: torch.dtype, order: str, data: str) -> None:
    problem = Problem.mm(M, N, K, dtype=dtype, device_type="cpu")
    for seed in range(4):
        operands = made(data, dtype, seed)
        out = ORDERS[order](operands.a.float(), operands.b.float()).to(dtype)
        assert ratio(problem, claims_of(dtype, splits=4), operands, out) <= 1


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_torch_stays_within(dtype: torch.dtype, data: str) -> None:
    problem = Problem.mm(M, N, K, dtype=dtype, device_type="cpu")
    for seed in range(4):
        operands = made(data, dtype, seed)
        flush = dtype == BF16  # what the processor's bfloat16 instructions do
        result = ratio(problem, claims_of(dtype, flush_subnormals=flush), operands, operands.a @ operands.b)
        assert result <= 1


@pytest.mark.parametrize("data", DATA)
def test_float64_stays_within_an_extended_reference(data: str) -> None:
    problem = Problem.mm(M, N, K, dtype=F64, device_type="cpu")
    for seed in range(4):
        operands = made(data, F64, seed)
        for product in (torch.matmul, one_by_one, pairwise):
            assert ratio(problem, claims_of(F64), operands, product(operands.a, operands.b), extended=True) <= 1


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("alpha", "beta"), [(1.25, -0.75), (-3, 1), (1, 40)])
def test_alpha_and_beta_stay_within(alpha: float, beta: float, data: str) -> None:
    for dtype in (F32, F16):
        problem = Problem.addmm(M, N, K, dtype=dtype, bias="mn", alpha=alpha, beta=beta, device_type="cpu")
        operands = made(data, dtype, 0, alpha, beta)
        assert operands.inp is not None
        out = (one_by_one(operands.a.float(), operands.b.float()) * alpha + operands.inp.float() * beta).to(dtype)
        assert ratio(problem, claims_of(dtype), operands, out) <= 1


@pytest.mark.parametrize("data", ["normal", "uniform", "wide range", "cancelling"])
@pytest.mark.parametrize(
    ("dtype", "product", "claims"),
    [
        (F16, rounding_blocks(F16), claims_of(F16, accumulate=F16, partials=F16)),
        (F16, split_k(F16, 4), claims_of(F16, partials=F16, splits=4)),
        (BF16, split_k(BF16, 8), claims_of(BF16, partials=BF16, splits=8)),
        (F32, tf32, claims_of(F32, input_mode="tf32")),
    ],
    ids=["fp16 accumulator", "fp16 partials", "bf16 partials", "tf32"],
)
def test_declared_lower_precision_stays_within(dtype: torch.dtype, product: object, claims: Claims, data: str) -> None:
    problem = Problem.mm(M, N, K, dtype=dtype, device_type="cpu")
    for seed in range(4):
        operands = made(data, dtype, seed)
        assert callable(product)
        out = product(operands.a.float(), operands.b.float()).to(dtype)
        assert ratio(problem, claims, operands, out) <= 1


def test_undeclared_lower_precision_exceeds_it() -> None:
    problem, operands = Problem.mm(M, N, K, dtype=BF16, device_type="cpu"), made("cancelling", BF16, 0)
    out = rounding_blocks(BF16)(operands.a.float(), operands.b.float()).bfloat16()
    assert ratio(problem, claims_of(BF16), operands, out) > 1
    problem, operands = Problem.mm(M, N, K, dtype=F32, device_type="cpu"), made("normal", F32, 0)
    assert ratio(problem, claims_of(F32), operands, tf32(operands.a, operands.b)) > 1


def test_flushed_subnormals_must_be_declared() -> None:
    problem, operands = Problem.mm(M, N, K, dtype=F32, device_type="cpu"), made("tiny", F32, 0)
    ones = Operands(a=operands.a, b=torch.ones(K, N), out=operands.out, inp=None, extra=(), alpha=1, beta=0)
    out = torch.zeros(M, N)
    assert ratio(problem, claims_of(F32), ones, out) > 1
    assert ratio(problem, claims_of(F32, flush_subnormals=True), ones, out) <= 1


def test_flushed_inputs_add_a_subnormal_number_times_the_largest_factor() -> None:
    problem, claims = Problem.mm(M, N, 64, dtype=F32, device_type="cpu"), claims_of(F32, flush_subnormals=True)
    less, more = (accumulation_bound(problem, claims, alpha=1, largest=lambda x=x: x).absolute for x in (1.0, 1025.0))
    assert more - less == pytest.approx(64 * 1024 * torch.finfo(F32).smallest_normal, rel=1e-3)


def test_overflow_to_the_right_infinity_is_right() -> None:
    problem = Problem.mm(M, N, K, dtype=F16, device_type="cpu")
    operands = made("normal", F16, 0)
    big = Operands(a=operands.a * 5000, b=operands.b, out=operands.out, inp=None, extra=(), alpha=1, beta=0)
    out = (big.a.float() @ big.b.float()).half()
    assert out.isinf().any()
    assert ratio(problem, claims_of(F16), big, out) <= 1
    assert ratio(problem, claims_of(F16), big, -out) == math.inf
    assert ratio(problem, claims_of(F16), big, out.nan_to_num(nan=0, posinf=0, neginf=0)) == math.inf


def test_formula() -> None:
    problem = Problem.mm(M, N, 256, dtype=F16, device_type="cpu")
    bound = accumulation_bound(problem, claims_of(F16, splits=2), alpha=1)
    assert bound.relative == pytest.approx((256 + 64 + 2 + 3) * 2**-24, rel=1e-3)
    assert bound.absolute < 1e-40
    assert float(bound(torch.tensor(2.0, dtype=F64))) == pytest.approx(2 * bound.relative)
    on_gpu = Problem.mm(M, N, 256, dtype=F16, device_type="cuda")
    assert accumulation_bound(on_gpu, claims_of(F16), alpha=1).relative == pytest.approx(324 * 2**-23, rel=1e-3)
    partials = accumulation_bound(problem, claims_of(F16, splits=2, partials=F16), alpha=1)
    assert partials.relative == pytest.approx(3 * 2**-11 + bound.relative, rel=1e-2)
    tf32_bound = accumulation_bound(Problem.mm(M, N, 16, dtype=F32, device_type="cpu"), claims_of(F32, input_mode="tf32"), alpha=1)
    assert tf32_bound.relative == pytest.approx(2 * 2**-10, rel=1e-2)


def test_steps_after_a_grouped_product_round_to_the_dtype_of_a() -> None:
    """Rows, weights and their products; the sums of a gated product, once; nothing of a plain product."""
    size, words, claims = (24, 12, 40), {"groups": 5, "dtype": BF16, "device_type": "cpu"}, claims_of(BF16)
    for problem, rounded in (
        (Problem.combined_grouped_mm(*size, tokens=8, **words), 3),
        (Problem.routed_grouped_mm(*size, tokens=11, gated="silu", **words), 1),
        (Problem.grouped_mm(*size, **words), 0),
    ):
        fused, in_steps = (accumulation_bound(problem, x, alpha=1).relative for x in (claims, by_steps(problem, claims)))
        assert in_steps - fused == pytest.approx(rounded * 2**-8, rel=1e-2), problem


def test_separately_scaled_blocks_of_k_add_operations() -> None:
    def relative(scales: str) -> float:
        problem = Problem.mixed_mm(M, N, 256, dtype=F32, scales=scales, device_type="cpu")
        return accumulation_bound(problem, claims_of(F32), alpha=1).relative

    assert relative("group_128") - relative("column") == pytest.approx(3 * 2**-24, rel=1e-2)


def test_exact_limit_follows_the_narrowest_type() -> None:
    problem = Problem.mm(M, N, K, dtype=BF16, device_type="cpu")
    assert exact_limit(problem, claims_of(BF16)) == 2**23
    assert exact_limit(problem, claims_of(BF16, partials=BF16)) == 2**7
    assert exact_limit(problem, claims_of(BF16, accumulate=F16)) == 2**10
    assert exact_limit(problem, claims_of(BF16, accumulator_bits=20)) == 2**19


def test_unknown_input_mode_is_refused() -> None:
    problem = Problem.mm(M, N, K, dtype=F32, device_type="cpu")
    with pytest.raises(GemmtuneError, match="input_mode: got 'bf16x9', expected one of ieee, parts, tf32"):
        accumulation_bound(problem, claims_of(F32, input_mode="bf16x9"), alpha=1)


def test_narrow_sums_count_for_no_more_products_than_there_are() -> None:
    def relative(k: int) -> float:
        problem = Problem.scaled_mm(16, 16, k, device_type="cuda")
        claims = Claims(accumulate=F32)
        return accumulation_bound(problem, claims, alpha=1.0).relative

    assert relative(16) < relative(128) / 4


def growth(*steps: float) -> float:
    """(1 + u)^n - 1 for the sum of these n·u."""
    return math.expm1(sum(steps))


CPU_MM = Problem.mm(M, N, 256, dtype=F16, device_type="cpu")
GPU_MM = Problem.mm(M, N, 256, dtype=F16, device_type="cuda")
GPU_F32 = Problem.mm(M, N, 256, dtype=F32, device_type="cuda")
GPU_FLOAT8 = Problem.scaled_mm(16, 16, 300, scales="tensor", device_type="cuda")
MIXED = Problem.mixed_mm(M, N, 256, dtype=F16, scales="column", zeros=True, device_type="cpu")
READ = growth((256 + 3) * 2**-53)
"""What the reference's own error adds for 256 products."""
FORMULAS: dict[str, tuple[Problem, dict[str, object], dict[str, object], float, float]] = {
    # problem, claims, arguments, relative, absolute but for a factor 1 + relative
    "sums": (CPU_MM, {"splits": 2}, {}, growth(325 * 2**-24) + READ, 325 * 2**-150),
    "reference": (Problem.mm(M, N, 256, dtype=F64, device_type="cpu"),
        dict.fromkeys(("accumulate", "partials", "epilogue_input"), F64), {},
        growth(324 * 2**-53) + READ, 324 * 2**-1075),
    "extended": (CPU_MM, {}, {"extended": True}, growth(324 * 2**-24), 324 * 2**-150),
    "terms": (CPU_MM, {}, {"terms": 1}, growth(6 * 2**-24) + growth(4 * 2**-53), 6 * 2**-150),
    "k is 0": (Problem.mm(M, N, 0, dtype=F16, device_type="cpu"), {}, {}, growth(4 * 2**-24) + growth(3 * 2**-53), 4 * 2**-150),
    "alpha": (CPU_MM, {}, {"alpha": -3.0, "extended": True}, growth(324 * 2**-24), 3 * 324 * 2**-150),
    "small alpha": (CPU_MM, {}, {"alpha": 0.5, "extended": True}, growth(324 * 2**-24), 324 * 2**-150),
    "partials": (
        CPU_MM, {"splits": 2, "partials": F16}, {"extended": True},
        (1 + growth(325 * 2**-24)) * (1 + growth(3 * 2**-11)) - 1, 3 * 2**-25 + 325 * 2**-150,
    ),
    "flushed": (CPU_MM, {"flush_subnormals": True}, {"extended": True, "largest": lambda: 1000.0},
        growth(324 * 2**-24), 324 * 2**-126 + 256 * 1000 * 2**-14),
    "flushed weights": (MIXED, {"flush_subnormals": True}, {"extended": True, "largest": lambda: 3.0},
        growth(324 * 2**-24), 4 * (324 * 2**-126 + 256 * 3 * 2**-14)),
    "8-bit weights are read as 16-bit ones": (
        Problem.mixed_mm(M, N, 256, dtype=F16, dtype_b=torch.float8_e4m3fn, scales="none", device_type="cpu"),
        {"flush_subnormals": True}, {"extended": True, "largest": lambda: 3.0},
        growth(324 * 2**-24), 324 * 2**-126 + 256 * 3 * 2**-14),
    "blocks of K": (Problem.mixed_mm(M, N, 256, dtype=F16, scales="group_32", device_type="cpu"), {}, {"extended": True},
        growth((324 + 9) * 2**-24), 2 * 333 * 2**-150),
    "two blocks of K": (Problem.mixed_mm(M, N, 256, dtype=F16, scales="group_128", device_type="cpu"), {}, {"extended": True},
        growth((324 + 3) * 2**-24), 2 * 327 * 2**-150),
    "rounded weights": (MIXED, {"weights": BF16}, {"extended": True, "largest": lambda: 3.0},
        (1 + growth(324 * 2**-24)) * (1 + growth(2 * 2**-8)) - 1, 4 * (324 * 2**-150 + 256 * 3 * 2**-134)),
    "rounded before the epilogue": (CPU_MM, {"epilogue_input": F16}, {"extended": True},
        (1 + growth(324 * 2**-24)) * (1 + 2**-11) - 1, 324 * 2**-150 + 2**-25),
    "tf32": (GPU_F32, {"input_mode": "tf32"}, {"extended": True},
        (1 + growth(324 * 2**-23)) * (1 + 2**-9 + 2**-20) - 1, 324 * 2**-150),
    "parts": (GPU_F32, {"input_mode": "parts"}, {"extended": True},
        (1 + growth(324 * 2**-23) + 2**-6 * 1.02 * growth(320 * 6 * 2**-23)) * (1 + 2**-21 + 2**-44) - 1, 324 * 2**-150),
    "parts that are promoted": (GPU_F32, {"input_mode": "parts", "promoted_every": 32}, {"extended": True},
        (1 + growth(40 * 2**-23, (8 + 4) * 2**-24) + 2**-6 * 1.02 * growth(320 * 6 * 2**-23)) * (1 + 2**-21 + 2**-44) - 1,
        324 * 2**-150),
    "promoted": (GPU_MM, {"promoted_every": 100, "splits": 2}, {"extended": True},
        growth(125 * 2**-23, (3 + 5) * 2**-24), 325 * 2**-150),
    "nothing is promoted": (Problem.mm(M, N, 0, dtype=F16, device_type="cuda"), {"promoted_every": 100}, {"extended": True},
        growth(4 * 2**-24), 4 * 2**-150),
    "promoted late": (GPU_MM, {"promoted_every": 1000}, {"extended": True}, growth(320 * 2**-23, 5 * 2**-24), 324 * 2**-150),
    "float32 rounds on a GPU": (GPU_F32, {}, {"extended": True}, growth(324 * 2**-24), 324 * 2**-150),
    "tensor cores cut off": (GPU_MM, {}, {"extended": True}, growth(324 * 2**-23), 324 * 2**-150),
    "fewer bits": (GPU_MM, {"accumulator_bits": 20, "splits": 2}, {"extended": True},
        growth(320 * 2**-19, 5 * 2**-23), 325 * 2**-150),
    "as many bits": (GPU_MM, {"accumulator_bits": 24}, {"extended": True}, growth(324 * 2**-23), 324 * 2**-150),
    "more bits than there are": (GPU_MM, {"accumulator_bits": 30}, {"extended": True}, growth(324 * 2**-23), 324 * 2**-150),
    "as many bits, promoted": (GPU_MM, {"accumulator_bits": 24, "promoted_every": 100}, {"extended": True},
        growth(125 * 2**-23, (3 + 4) * 2**-24), 324 * 2**-150),
    "one bit fewer": (CPU_MM, {"accumulator_bits": 23}, {"extended": True}, growth(320 * 2**-23, 4 * 2**-24), 324 * 2**-150),
    "float8": (GPU_FLOAT8, {}, {"extended": True}, growth(160 * 2**-13, (3 + 4) * 2**-23), 4 * 379 * 2**-150),
    "float8, fast": (dataclasses.replace(GPU_FLOAT8, fast_accum=True), {}, {"extended": True},
        growth(375 * 2**-13, 4 * 2**-23), 4 * 379 * 2**-150),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_every_term_of_the_formula(name: str) -> None:
    problem, claims, arguments, relative, absolute = FORMULAS[name]
    bound = accumulation_bound(problem, claims_of(F16, **claims), **({"alpha": 1.0} | arguments))  # type: ignore[arg-type]
    assert bound.relative == pytest.approx(relative, rel=1e-12)
    assert bound(torch.tensor(3.0, dtype=F64)) == bound.absolute + 3 * bound.relative
    # What is rounded before the epilogue is added after the factors.
    assert absolute * (1 - 1e-9) <= bound.absolute <= absolute * (1 + relative) * (1 + 1e-9)


def test_largest_factor_is_computed_only_if_it_matters() -> None:
    asked: list[str] = []

    def largest() -> float:
        asked.append("waits for the device")
        return 4.0

    accumulation_bound(CPU_MM, claims_of(F16), alpha=1, largest=largest)
    flushing = claims_of(F16, flush_subnormals=True, weights=BF16)
    empty, some = (Problem.mixed_mm(M, N, k, dtype=F16, scales="column", device_type="cpu") for k in (0, 64))
    accumulation_bound(empty, flushing, alpha=1, largest=largest)
    assert not asked
    accumulation_bound(some, flushing, alpha=1, largest=largest)
    assert asked


def test_useless_bound_is_still_a_number() -> None:
    problem = Problem.mm(1, 1, 2**22, dtype=F16, device_type="cpu")
    assert math.isfinite(accumulation_bound(problem, claims_of(F16, accumulate=F16), alpha=1).relative)


def test_integers_have_no_error_of_a_reference() -> None:
    problem = Problem.int_mm(M, N, 256, device_type="cpu")
    bound = accumulation_bound(
        problem, claims_of(F32, **dict.fromkeys(("accumulate", "partials", "epilogue_input"), torch.int32)), alpha=1
    )
    assert (bound.relative, bound.absolute) == (0, 0)
