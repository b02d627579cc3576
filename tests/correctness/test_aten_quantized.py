"""torch's own operations on quantized operands: right in every layout, and what they cannot do is made so that they can."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from quantized_cases import (
    E4M3,
    E5M2,
    SCALES_A,
    SCALES_B,
    float8_scale,
    floats,
    integers,
    mixed_operands,
    positive,
    problem_of,
    repeated,
    views,
)

from gemmtune.backends.aten import BACKEND
from gemmtune.backends.aten.int8 import kernel_of as int_kernel
from gemmtune.backends.aten.scaled import _rows_aligned, rows_on_this_cpu
from gemmtune.backends.aten.scaled import kernel_of as scaled_kernel
from gemmtune.backends.scaling import MODES, at_blocks, mode_of
from gemmtune.choice import Choice, Kernel
from gemmtune.device import detect, preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.compositions import sums_of_blocks
from gemmtune.problem.dtypes import dtype_info
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

CPU = detect("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = [(5, 7, 6), (33, 20, 129), (1, 20, 33), (17, 1, 64), (18, 3, 1)]
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))


def offered(problem: Problem, arch: str | None = None) -> list[Choice]:
    return list(BACKEND.enumerate(problem, preset(arch) if arch else CPU, Settings()).choices)


def outputs(m: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    flat = torch.full((m * n + 1,), 77, dtype=dtype)
    return [
        torch.full((m, n), 77, dtype=dtype),
        torch.full((n, m), 77, dtype=dtype).t(),
        torch.full((m, n + 3), 77, dtype=dtype)[:, :n],
        torch.full((m, 2 * n), 77, dtype=dtype)[:, ::2],
        flat[1:].view(m, n),
    ]


def results(kernel: Kernel, problem: Problem, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *extra: torch.Tensor):
    """Return the results of ``run`` and ``run_new``. torch must not resize ``out``, which would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.run(out, (a, b, *extra), ())
        fresh = [] if kernel.run_new is None else [kernel.run_new((a, b, *extra), ())]
    for new in fresh:
        assert Layout.of(new) == problem.out
    return [out, *fresh]


def within(got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, k: int, inner: float = 0.0) -> bool:
    """One rounding to the dtype of ``got``, and of S ``inner`` and K + 8 steps in float32; twice over."""
    info = dtype_info(got.dtype)
    limit = 2 * (info.unit_roundoff * exact.abs() + (inner + (k + 8) * 2**-24) * magnitude) + info.smallest_normal
    return bool(((got.double() - exact).abs() <= limit).all())


@sizes
def test_int_mm_is_exact_in_every_layout(size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b = integers((m, k), -128, 127, 1), integers((k, n), -128, 127, 2)
    layouts_a, layouts_b = ([*views(x), *repeated(x)] for x in (a, b))
    for (_, x), (_, y) in itertools.product(layouts_a, layouts_b):
        exact = x.long() @ y.long()
        for out in outputs(m, n, torch.int32)[:: 1 if x is layouts_a[0][1] else 5]:
            problem = problem_of("int_mm", x, y, out)
            (choice,) = offered(problem)
            assert (choice.name, choice.baseline, choice.claims.accumulate) == ("aten:_int_mm", True, torch.int32)
            for got in results(choice.build(), problem, out, x, y):
                assert torch.equal(got.long(), exact)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_int_mm_gives_its_epilogue_the_sum_as_float32(dtype: torch.dtype) -> None:
    a, b = integers((9, 600), -128, 127, 1), integers((600, 11), -128, 127, 2)
    scale, shift = positive((11,), F16, 3), positive((9, 1), F32, 4)
    epilogue = trace(lambda acc, s, t: acc * 2**-6 * s + t, F32, [scale, shift])
    exact = (a.double() @ b.double()) * 2**-6 * scale.double() + shift.double()
    for out in outputs(9, 11, dtype):
        problem = problem_of("int_mm", a, b, out, epilogue=epilogue)
        (choice,) = offered(problem)
        assert (choice.name, choice.claims.epilogue_input) == ("aten:_int_mm+eager", F32)
        for got in results(choice.build(), problem, out, a, b, scale, shift):
            assert within(got, exact, exact.abs(), 4)


@pytest.mark.parametrize("size", [(1, 20, 33), (16, 16, 16), (17, 7, 8), (18, 9, 16), (40, 16, 9)], ids=str)
def test_int_mm_on_padded_operands(size: tuple[int, int, int]) -> None:
    """Check the GPU's padded copies on a CPU, where they are the same."""
    m, n, k = size
    a, b = integers((m, k), -128, 127, 1), integers((k, n), -128, 127, 2)
    for (_, x), (_, y) in itertools.product(views(a), views(b)):
        out = torch.zeros(m, n, dtype=torch.int32)
        problem = problem_of("int_mm", x, y, out, device_type="cuda")
        (choice,) = offered(problem, "sm90")
        assert choice.name == "aten:_int_mm_pad"
        for got in results(int_kernel(problem, "_int_mm_pad"), problem, out, x, y):
            assert torch.equal(got.long(), x.long() @ y.long())


def test_int_mm_on_cuda_refuses_with_a_reason() -> None:
    def refusals(m: int, n: int, k: int, layout: str = "nt") -> list[str]:
        problem = Problem.int_mm(m, n, k, layout=layout, device_type="cuda")
        found = BACKEND.enumerate(problem, preset("sm90"), Settings())
        assert [c.baseline for c in found.choices] == [True]
        return [r.reason for r in found.refusals]

    assert refusals(17, 8, 8) == refusals(4096, 4096, 4096, "tn") == refusals(20, 24, 40, "tt") == []
    assert "with a multiple of 4 rows if it is column-major" in refusals(17, 24, 40, "tn")[0]
    assert refusals(16, 8, 8) == ["on a GPU it takes at least 17 rows of a, got 16"]
    assert refusals(17, 12, 8) == ["on a GPU it takes multiples of 8 for N, got 12"]
    assert refusals(17, 8, 12) == ["on a GPU it takes multiples of 8 for K, got 12"]


@pytest.mark.rotates(2)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    ("dtype_b", "encoding"),
    [(torch.int8, ""), (torch.uint8, ""), (E4M3, ""), (E5M2, ""), (torch.uint8, "int4"), (torch.uint8, "uint4")],
    ids=lambda x: str(x).removeprefix("torch."),
)
@pytest.mark.parametrize("scales", ["none", "tensor", "one", "column", "group_32", "group_64", "group_128"])
def test_mixed_mm(dtype: torch.dtype, dtype_b: torch.dtype, encoding: str, scales: str) -> None:
    m, n, k = 5, 12, 150
    kinds = [(False, None)] if scales == "none" else [(False, None), (True, None), (True, F32)]
    for zeros, scale_dtype in kinds:
        a, b, scale, zero, weights = mixed_operands(
            m, n, k, dtype=dtype, dtype_b=dtype_b, encoding=encoding, scales=scales, zeros=zeros, scale_dtype=scale_dtype
        )
        exact, magnitude = a.double() @ weights, a.double().abs() @ weights.abs()
        rounding = 0.0 if scale is None else 2 * dtype_info(dtype).unit_roundoff
        extra = [x for x in (scale, zero) if x is not None]
        for (_, x), (_, y), out in zip(views(a), [*views(b)][::-1], outputs(m, n, dtype), strict=True):
            problem = problem_of("mixed_mm", x, y, out, scale_b=scale, zero_b=zero, encoding=encoding)
            (choice,) = offered(problem)
            assert (choice.name, choice.baseline) == ("aten:mixed_mm", True)
            assert choice.claims.weights == (None if scale is None else dtype)
            for got in results(choice.build(), problem, out, x, y, *extra):
                assert within(got, exact, magnitude, k, rounding)


def test_mixed_mm_with_an_epilogue_and_a_wider_result() -> None:
    a, b, scale, _, weights = mixed_operands(9, 12, 64, dtype=F16, scales="column")
    assert scale is not None
    bias = floats((12,), F32, 5)
    epilogue = trace(lambda acc, x: torch.relu(acc + x).to(F32), F32, [bias])
    exact = torch.relu(a.double() @ weights + bias.double())
    for out in outputs(9, 12, F32):
        problem = problem_of("mixed_mm", a, b, out, scale_b=scale, epilogue=epilogue)
        (choice,) = offered(problem)
        assert choice.claims.epilogue_input == F32
        for got in results(choice.build(), problem, out, a, b, scale, bias):
            assert within(got, exact, a.double().abs() @ weights.abs() + bias.double().abs(), 64, 2**-10)


@pytest.mark.parametrize(
    ("dtypes", "out_dtype"), [((E4M3, E4M3), F32), ((E4M3, E5M2), BF16), ((E5M2, E4M3), BF16), ((E5M2, E5M2), F16)], ids=str
)
@pytest.mark.parametrize("scales", [*itertools.product(SCALES_A, SCALES_B)], ids=lambda s: f"{s[0]}-{s[1]}")
def test_scaled_mm(scales: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype) -> None:
    m, n, k = (131, 140, 130) if out_dtype == F32 else (5, 12, 300)
    a, b = floats((m, k), dtypes[0], 1), floats((k, n), dtypes[1], 2)
    scale_a, whole_a = float8_scale((m, k), SCALES_A[scales[0]][1], 3)
    scale_b, whole_b = float8_scale((k, n), SCALES_B[scales[1]][1], 4)
    wide_a, wide_b = a.double() * whole_a, b.double() * whole_b
    exact, magnitude = wide_a @ wide_b, wide_a.abs() @ wide_b.abs()
    for (_, x), (_, y), out in zip(views(a), [*views(b)][::-1], outputs(m, n, out_dtype), strict=True):
        problem = problem_of("scaled_mm", x, y, out, scale_a=scale_a, scale_b=scale_b)
        choices = offered(problem)
        native = set(scales) <= ({"tensor", "row", "column"} if rows_on_this_cpu() else {"tensor"})
        assert [c.name for c in choices] == ["aten:_scaled_mm"] * native + ["aten:dequantized_mm"]
        assert [c.baseline for c in choices] == [True] + [False] * native
        for choice in choices:
            for got in results(choice.build(), problem, out.fill_(77), x, y, scale_a, scale_b):
                assert within(got, exact, magnitude, k)


@pytest.mark.parametrize("out_dtype", [F32, F16, BF16], ids=str)
def test_scaled_mm_with_a_bias_and_with_an_epilogue(out_dtype: torch.dtype) -> None:
    a, b, bias = floats((9, 40), E4M3, 1), floats((40, 12), E4M3, 2), floats((12,), out_dtype, 5)
    scale = positive((), F32, 3)
    product = (a.double() * scale.double()) @ (b.double() * scale.double())
    for function, exact in (
        (lambda acc, x: acc + x, product + bias.double()),
        (lambda acc, x: torch.relu(acc) * x, torch.relu(product) * bias.double()),
    ):
        epilogue = trace(function, F32, [bias])
        for out in outputs(9, 12, out_dtype):
            problem = problem_of("scaled_mm", a, b, out, scale_a=scale, scale_b=scale, epilogue=epilogue)
            for choice in offered(problem):
                assert choice.claims.epilogue_input == F32  # torch's product too, which does not round before
                rounding = 2 * dtype_info(F32).unit_roundoff
                magnitude = (product.abs() + 1) * (bias.double().abs() + 1)
                for got in results(choice.build(), problem, out.fill_(77), a, b, scale, scale, bias):
                    assert within(got, exact, magnitude, 40, rounding)


@pytest.mark.parametrize(
    "scales",
    [
        "tensor",
        pytest.param("row", marks=pytest.mark.skipif(not rows_on_this_cpu(), reason="torch has no such scales on this CPU")),
    ],
)
@pytest.mark.parametrize("size", [(16, 16, 16), (1, 20, 33), (17, 16, 48), (5, 40, 32)], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "bias"])
def test_scaled_mm_on_copies_padded_for_cuda(size: tuple[int, int, int], scales: str, fused: bool) -> None:
    """Run CUDA's padded copies on the CPU, whose ``_scaled_mm`` supports these scales too."""
    m, n, k = size
    a, b = floats((m, k), E4M3, 1), floats((k, n), E4M3, 2)
    scale_a, whole_a = float8_scale((m, k), SCALES_A[scales][1], 3)
    scale_b, whole_b = float8_scale((k, n), SCALES_B["column" if scales == "row" else scales][1], 4)
    wide_a, wide_b, bias = a.double() * whole_a, b.double() * whole_b, floats((n,), BF16, 5)
    epilogue = trace(lambda acc, x: x + acc, F32, [bias]) if fused else None
    exact = wide_a @ wide_b + (bias.double() if fused else 0)
    for (_, x), (_, y), out in zip(views(a), views(b), outputs(m, n, BF16), strict=True):
        problem = problem_of("scaled_mm", x, y, out, scale_a=scale_a, scale_b=scale_b, epilogue=epilogue, device_type="cuda")
        (choice,) = offered(problem, "sm90")
        assert (choice.name, choice.claims.epilogue_input) == ("aten:_scaled_mm", F32)
        extra = (scale_a, scale_b, bias) if fused else (scale_a, scale_b)
        for got in results(scaled_kernel(problem), problem, out, x, y, *extra):
            assert within(got, exact, wide_a.abs() @ wide_b.abs() + 2, k)


@pytest.mark.parametrize("shape_a", [(), (5, 1), (5, 300)], ids=str)
@pytest.mark.parametrize("shape_b", [(), (1, 7), (300, 7)], ids=str)
def test_sums_of_blocks_along_k(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)

    def factors(shape: tuple[int, ...], dim: int) -> torch.Tensor:
        """Another one for each 128 elements of K."""
        values = torch.rand(shape, generator=generator) + 0.5
        if shape and shape[dim] == 300:
            values = values.index_select(dim, torch.arange(300) // 128 * 128)
        return values

    a, b = (torch.randint(-4, 5, size, generator=generator).float() for size in ((5, 300), (300, 7)))
    factor_a, factor_b = factors(shape_a, 1), factors(shape_b, 0)
    want = (a.double() * factor_a.double()) @ (b.double() * factor_b.double())
    got = sums_of_blocks(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), factor_a, factor_b)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)


def test_blocks_are_torchs_business_for_e4m3_alone() -> None:
    def names(dtype: torch.dtype, dtype_b: torch.dtype, *, fast: bool = False) -> list[str]:
        problem = Problem.scaled_mm(
            64, 96, 512, dtype=dtype, dtype_b=dtype_b, scales="block_128x128", fast_accum=fast, device_type="cuda"
        )
        return [choice.name for choice in offered(problem, "sm90")]

    assert names(E4M3, E4M3) == names(E4M3, E4M3, fast=True) == ["aten:_scaled_mm"]
    assert names(E4M3, E5M2) == names(E5M2, E4M3) == ["aten:dequantized_mm"]


@pytest.mark.parametrize("name", [n for n, mode in MODES.items() if mode.blocks])
@pytest.mark.parametrize("size", [(256, 384, 512), (100, 48, 300), (1, 16, 128), (3, 144, 640)], ids=str)
def test_block_scales_get_the_layout_of_cublaslt(name: str, size: tuple[int, int, int]) -> None:
    """Row blocks give column-major [rows, K/128]. Squares give column-major [K/128, rows/128], K/128 padded to a multiple of 4."""
    m, n, k = size
    mode, kb = MODES[name], -(-k // 128)
    for side, extent, block in (("a", m, mode.a), ("b", n, mode.b)):
        rows = -(-extent // 128) if block == (128, 128) else extent
        fine = positive((rows, kb), F32, 3)
        given = fine if side == "a" else fine.t()
        grow = -extent % 16
        operand = (extent, k) if side == "a" else (k, extent)
        placed = (mode.place_a if side == "a" else mode.place_b)(at_blocks(given, operand, block), grow)
        if block == (128, 128):
            assert placed.shape == (-(-kb // 4) * 4, rows)
            assert torch.equal(placed[:kb], fine.t())
        else:
            assert placed.shape == (extent + grow, kb)
            assert torch.equal(placed[:extent], fine)
        assert placed.stride(0) == 1
        assert placed.shape[1] == 1 or placed.stride(1) == placed.shape[0]


@pytest.mark.parametrize(
    ("scale_a", "scale_b", "mode"),
    [
        ("tensor", "tensor", "tensor"),
        ("tensor", "column", "row"),
        ("row", "tensor", "row"),
        ("1x128", "128x128", "1x128_128x128"),
        ("row", "128x128", "1x128_128x128"),
        ("tensor", "128x128", "1x128_128x128"),
        ("128x128", "column", "128x128_128x1"),
        ("128x128", "128x128", "1x128_128x128"),
        ("1x128", "128x1", "1x128_128x1"),
        ("1x128", "column", "1x128_128x1"),
    ],
)
def test_coarse_scales_are_repeated_for_the_coarsest_matching_mode(scale_a: str, scale_b: str, mode: str) -> None:
    m, n, k = 200, 160, 320
    first, whole_a = float8_scale((m, k), SCALES_A[scale_a][1], 1)
    second, whole_b = float8_scale((k, n), SCALES_B[scale_b][1], 2)
    a, b, out = torch.empty(m, k, dtype=E4M3), torch.empty(k, n, dtype=E4M3), torch.empty(m, n, dtype=BF16)
    problem = problem_of("scaled_mm", a, b, out, scale_a=first, scale_b=second)
    assert mode_of(problem) == mode
    for scale, whole, block in ((first, whole_a, MODES[mode].a), (second, whole_b, MODES[mode].b)):
        fine = at_blocks(scale, tuple(whole.shape), block).double()
        rows, cols = (extent if side is None else side for side, extent in zip(block, whole.shape, strict=True))
        assert torch.equal(fine.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: whole.shape[0], : whole.shape[1]], whole)


@pytest.mark.parametrize(("version", "serves"), [("12.8", False), ("12.9", True), ("13.0", True), ("11.12", False), (None, True)])
def test_scales_of_rows_need_a_cuda_version(version: str | None, serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    for scales in ("row", "block_128x128"):
        problem = Problem.scaled_mm(64, 128, 256, scales=scales, device_type="cuda")
        found = BACKEND.enumerate(problem, preset("sm90"), Settings()).refusals
        assert [x.reason for x in found if "12.9" in x.reason] == ([] if serves else [found[0].reason])


def test_operands_with_unaligned_or_overlapping_rows_are_copied() -> None:
    taken = {
        ((64, 1), 0): True,
        ((48, 1), 0): True,
        ((72, 1), 0): False,
        ((64, 1), 16): False,
        ((32, 1), 0): False,
        ((1, 64), 0): False,
    }
    for (stride, offset), aligned in taken.items():
        layout = Layout(size=(4, 48), stride=stride, offset=offset, dtype=torch.float8_e4m3fn)
        assert _rows_aligned(layout) == aligned, layout


def test_scaled_mm_refuses_with_a_reason() -> None:
    def reasons(arch: str, **options: object) -> list[str]:
        problem = Problem.scaled_mm(64, 64, 256, device_type="cuda", **options)  # type: ignore[arg-type]
        found = BACKEND.enumerate(problem, preset(arch), Settings())
        assert [c.baseline for c in found.choices] == [True]
        return [r.reason for r in found.refusals]

    assert reasons("sm90") == reasons("sm100") == []
    assert reasons("sm80") == ["its 8-bit floats need an NVIDIA GPU of compute capability 8.9, got sm80"]
    assert reasons("sm90", dtype=E5M2) == ["cuBLASLt does not multiply two float8_e5m2 matrices"]
    assert reasons("sm100", scales="row") == ["scales for row are tried on sm90 only, got sm100"]
    zero = Problem.scaled_mm(4, 4, 0, device_type="cpu")
    assert [r.reason for r in BACKEND.enumerate(zero, CPU, Settings()).refusals] == ["K is 0: nothing to multiply"]


@pytest.mark.parametrize(
    "problem",
    [
        Problem.int_mm(3, 4, 0, device_type="cpu"),
        Problem.mixed_mm(3, 4, 0, scales="group_32", zeros=True, device_type="cpu"),
        Problem.mixed_mm(3, 4, 0, encoding="int4", device_type="cpu"),
        Problem.scaled_mm(3, 4, 0, scales="block_1x128", device_type="cpu"),
        Problem.scaled_mm(3, 4, 0, scales="row", device_type="cpu"),
    ],
    ids=str,
)
def test_k_zero_gives_zeros(problem: Problem) -> None:
    out = torch.full(problem.out.size, 7, dtype=problem.out.dtype)
    a, b = torch.empty(problem.a.size, dtype=problem.a.dtype), torch.empty(problem.b.size, dtype=problem.b.dtype)
    extra = [torch.ones(layout.size, dtype=layout.dtype) for layout in problem.scales]
    for choice in offered(problem):
        for got in results(choice.build(), problem, out, a, b, *extra):
            assert not got.any()


def test_choices_are_picklable_and_have_hashes_of_their_own() -> None:
    choices = offered(Problem.scaled_mm(64, 32, 48, device_type="cpu"))
    assert pickle.loads(pickle.dumps(choices)) == choices
    assert len({c.content_hash for c in choices}) == 2


def _bias(function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[bool]:
    epilogue = trace(function, F32, [x])
    out, a, b = torch.empty(64, 32, dtype=BF16), torch.empty(64, 48, dtype=E4M3), torch.empty(32, 48, dtype=E4M3).t()
    one = torch.ones(())
    problem = problem_of("scaled_mm", a, b, out, scale_a=one, scale_b=one, epilogue=epilogue, device_type="cuda")
    return ["bias" in c.info for c in offered(problem, "sm90")]


def test_only_a_plain_bias_is_fused() -> None:
    bias = torch.ones(32, dtype=BF16)
    assert _bias(lambda acc, x: acc + x, bias) == [True]
    assert _bias(lambda acc, x: (x + acc).to(BF16), bias[None]) == [True]
    assert _bias(lambda acc, x: acc + x, bias.float()) == [False]
    assert _bias(lambda acc, x: acc + 2 * x, bias) == [False]
    assert _bias(lambda acc, x: acc * x, bias) == [False]
    assert _bias(lambda acc, x: torch.relu(acc + x), bias) == [False]
    assert _bias(lambda acc, x: acc + x, torch.ones(64, 1, dtype=BF16)) == [False]
    assert _bias(lambda acc, x: acc + x, torch.ones(64, dtype=BF16)[::2]) == [False]
