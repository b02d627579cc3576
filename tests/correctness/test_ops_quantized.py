"""The public operations on quantized operands, against float64, on every kind of call."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from quantized_cases import E4M3, E5M2, SCALES_A, SCALES_B, float8_scale, floats, integers, mixed_operands, positive, views
from rotation import rotated

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.prepack import _in_place_of
from gemmtune.dispatch.ready import ready
from gemmtune.errors import InvalidProblemError
from gemmtune.problem.dtypes import dtype_info

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
M, N, K = 9, 20, 70


@pytest.fixture(autouse=True)
def torch_alone(own_store):
    """With one choice for each problem nothing is measured: these tests are about calls."""
    with settings.patch(backends=("aten",), choice_denylist_regex="^aten:dequantized_mm", tune_in_subprocess=False):
        yield


def assert_close(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, rounding: float = 0.0, dtype=None) -> None:
    """Within two roundings to the dtype, and of S ``rounding`` and K steps in float32."""
    assert got.dtype == (dtype or got.dtype)
    limit = 2 * dtype_info(got.dtype).unit_roundoff * want.abs() + (rounding + 2 * K * 2**-24) * magnitude + 2.0**-24
    assert ((got.double() - want).abs() <= limit).all()


def int_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = integers((M, K), -128, 127, 1), integers((K, N), -128, 127, 2)
    return a, b, a.long() @ b.long()


def float8_operands(scales: tuple[str, str] = ("tensor", "tensor")):
    """a, b, scale_a, scale_b, the product and its magnitude in float64."""
    a, b = floats((M, K), E4M3, 1), floats((K, N), E5M2, 2)
    scale_a, whole_a = float8_scale((M, K), SCALES_A[scales[0]][1], 3)
    scale_b, whole_b = float8_scale((K, N), SCALES_B[scales[1]][1], 4)
    wide_a, wide_b = a.double() * whole_a, b.double() * whole_b
    return a, b, scale_a, scale_b, wide_a @ wide_b, wide_a.abs() @ wide_b.abs()


def test_int_mm_in_every_layout():
    a, b, exact = int_operands()
    for (_, x), (_, y) in itertools.product(views(a), views(b)):
        for _ in range(2):  # the second call runs the plan of the first
            got = gemmtune.int_mm(x, y)
            assert got.dtype == torch.int32
            assert torch.equal(got.long(), exact)
        out = torch.zeros(M, 2 * N, dtype=torch.int32)[:, ::2]
        assert gemmtune.int_mm(x, y, out=out) is out
        assert torch.equal(out.long(), exact)


def test_int_mm_with_an_epilogue():
    a, b, exact = int_operands()
    got = gemmtune.int_mm(a, b, epilogue=lambda acc: torch.relu(acc) * 0.5)
    assert_close(got, torch.relu(exact.double()) * 0.5, exact.abs(), dtype=F32)
    got = gemmtune.int_mm(a, b, epilogue=lambda acc: (acc * 2**-6).to(F16))
    assert_close(got, exact.double() * 2**-6, exact.abs() * 2**-6, dtype=F16)


@pytest.mark.parametrize("shape", [(), (1,), (N,), (1, N), (M, 1), (M, N)], ids=str)
@pytest.mark.parametrize(("dtype", "out_dtype"), [(F32, None), (F16, None), (BF16, None), (F32, F16), (F16, BF16)], ids=str)
def test_int_mm_mul(shape: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype | None):
    a, b, exact = int_operands()
    scale = positive(shape, dtype, 3) * 2**-5
    want = exact.double() * scale.double()
    expected = out_dtype or torch.promote_types(dtype, torch.int32)
    for _ in range(2):
        assert_close(gemmtune.int_mm_mul(a, b, scale, out_dtype=out_dtype), want, want.abs(), dtype=expected)
    out = torch.empty(N, M, dtype=expected).t()
    assert gemmtune.int_mm_mul(a, b, scale, out_dtype=out_dtype, out=out) is out
    assert_close(out, want, want.abs())


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype_b": torch.uint8},
        {"dtype_b": E5M2},
        {"scales": "column"},
        {"scales": "tensor", "zeros": True, "scale_dtype": F32},
        {"scales": "group_32", "zeros": True, "encoding": "int4"},
        {"scales": "group_64", "encoding": "uint4", "scale_dtype": F32},
    ],
    ids=str,
)
def test_mixed_mm(options: dict, dtype: torch.dtype):
    a, b, scale, zero, weights = mixed_operands(M, N, K, dtype=dtype, **options)
    want, magnitude = a.double() @ weights, a.double().abs() @ weights.abs()
    rounding = 0.0 if scale is None else 4 * dtype_info(dtype).unit_roundoff
    encoding = options.get("encoding", "")
    for (_, x), (_, y) in zip(views(a), [*views(b)][::-1], strict=True):
        for _ in range(2):
            got = gemmtune.mixed_mm(x, y, scale_b=scale, zero_b=zero, encoding=encoding)
            assert_close(got, want, magnitude, rounding, dtype)
    bias = floats((N,), F32, 7)
    got = gemmtune.mixed_mm(
        a, b, scale_b=scale, zero_b=zero, encoding=encoding, epilogue=lambda acc, x: (acc + x).to(F32), epilogue_args=(bias,)
    )
    assert_close(got, want + bias.double(), magnitude + 4, rounding + 2 * dtype_info(dtype).unit_roundoff, F32)


@pytest.mark.parametrize("out_dtype", rotated([F32, F16, BF16], 3, "out_dtype"), ids=str)
@pytest.mark.parametrize("scales", [("tensor", "tensor"), ("row", "column"), ("1x128", "128x128"), ("row", "128x1")], ids=str)
def test_scaled_mm(scales: tuple[str, str], out_dtype: torch.dtype):
    a, b, scale_a, scale_b, want, magnitude = float8_operands(scales)
    with settings.patch(choice_denylist_regex=None if "1" in "".join(scales) else "dequantized"):
        for _ in range(2):
            assert_close(gemmtune.scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype), want, magnitude, dtype=out_dtype)
        for bias in (floats((N,), out_dtype, 5), floats((M, 1), F32, 6)):
            for _ in range(2):
                got = gemmtune.scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
                rounding = 2 * dtype_info(out_dtype).unit_roundoff  # torch's operation, then the sum
                assert_close(got, want + bias.double(), magnitude + 3, rounding, out_dtype)


@pytest.mark.parametrize("scales", [("row", "column"), ("1x128", "128x128")], ids="-".join)
def test_scaled_mm_with_any_strides_of_dimensions_of_one(scales: tuple[str, str]):
    a, b, scale_a, scale_b, want, magnitude = float8_operands(scales)
    odd_a, odd_b = (
        x.as_strided(x.shape, [77 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)])
        for x in (scale_a, scale_b)
    )
    assert odd_a.stride() != scale_a.stride()
    assert_close(gemmtune.scaled_mm(a, b, odd_a, odd_b, out_dtype=F32), want, magnitude, dtype=F32)


def test_scaled_mm_with_a_bias_and_an_epilogue():
    a, b, scale_a, scale_b, want, magnitude = float8_operands()
    bias, factor = floats((N,), F32, 5), positive((M, 1), F32, 6)
    got = gemmtune.scaled_mm(
        a, b, scale_a, scale_b, bias=bias, epilogue=lambda acc, f: torch.relu(acc) * f, epilogue_args=(factor,), out_dtype=F32
    )
    want = torch.relu(want + bias.double()) * factor.double()
    assert_close(got, want, 2 * magnitude + 3, dtype=F32)


def test_a_cast_at_the_end_of_the_epilogue_names_the_dtype():
    a, b, scale_a, scale_b, want, magnitude = float8_operands()
    got = gemmtune.scaled_mm(a, b, scale_a, scale_b, epilogue=lambda acc: acc.to(F16))
    assert_close(got, want, magnitude, dtype=F16)


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (0, 0, 0), (4, 5, 0), (1, 1, 1), (1, 7, 2)])
def test_sizes_of_0_and_1(shape: tuple[int, int, int]):
    m, n, k = shape
    a, b = torch.ones(m, k, dtype=torch.int8), torch.ones(k, n, dtype=torch.int8)
    one = torch.ones(())
    want = torch.full((m, n), float(k))
    for got in (
        gemmtune.int_mm(a, b),
        gemmtune.int_mm_mul(a, b, one),
        gemmtune.mixed_mm(a.float(), b),
        gemmtune.mixed_mm(a.half(), b, scale_b=torch.ones(1, n)),
        gemmtune.mixed_mm(a.half(), b, scale_b=torch.ones(-(-k // 32), n), zero_b=torch.zeros(-(-k // 32), n)),
        gemmtune.scaled_mm(a.to(E4M3), b.to(E4M3), one, one),
        gemmtune.scaled_mm(a.to(E4M3), b.to(E4M3), torch.ones(m, 1), torch.ones(1, n), bias=torch.zeros(n)),
    ):
        assert torch.equal(got.float(), want)


def test_packed_weights_of_size_0():
    empty = torch.empty(0, 3, dtype=torch.uint8)
    assert torch.equal(gemmtune.mixed_mm(torch.empty(2, 0), empty, encoding="int4"), torch.zeros(2, 3))


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("encoding", ["int4", "uint4"])
def test_packing_and_back(encoding: str, layout: str):
    low = -8 if encoding == "int4" else 0
    weight = torch.arange(low, low + 16, dtype=torch.int64).repeat(3).reshape(6, 8)
    weight = weight if layout == "row" else weight.t().contiguous().t()
    packed = gemmtune.pack_int4(weight, encoding=encoding)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, 8))
    assert packed.stride() == ((8, 1) if layout == "row" else (1, 3))
    assert torch.equal(packed & 15, (weight[0::2] & 15).to(torch.uint8))
    assert torch.equal(packed >> 4, (weight[1::2] & 15).to(torch.uint8))
    assert torch.equal(gemmtune.unpack_int4(packed, encoding=encoding).long(), weight)


def test_prepacked_operands():
    a, b, exact = int_operands()
    packed = gemmtune.prepack(b)
    for _ in range(2):
        assert torch.equal(gemmtune.int_mm(a, packed).long(), exact)
        scaled = gemmtune.int_mm_mul(a, packed, torch.full((N,), 0.5))
        assert torch.equal(scaled.double(), exact.double() * 0.5)
    x, w, scale, _, weights = mixed_operands(M, N, K, dtype=F32, encoding="int4", scales="group_32")
    got = gemmtune.mixed_mm(x, gemmtune.prepack(w, op="mixed_mm"), scale_b=scale, encoding="int4")
    assert_close(got, x.double() @ weights, x.double().abs() @ weights.abs())


@pytest.mark.parametrize("transformed", [False, True], ids=["a", "everything"])
def test_gradients_of_mixed_mm_are_those_of_torchs_composition(transformed: bool):
    a, b, scale, zero, _ = mixed_operands(M, N, K, dtype=F32, scales="group_32", zeros=True)
    leaves = [x.clone().requires_grad_(transformed or i == 0) for i, x in enumerate((a, scale, zero))]
    twins = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
    gemmtune.mixed_mm(leaves[0], b, scale_b=leaves[1], zero_b=leaves[2]).square().sum().backward()
    spread = [x.repeat_interleave(32, 0)[:K] for x in twins[1:]]
    (twins[0] @ ((b.float() - spread[1]) * spread[0])).square().sum().backward()
    for leaf, twin in zip(leaves, twins, strict=True):
        assert (leaf.grad is None) == (twin.grad is None)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, twin.grad)


def test_a_warm_plan_does_not_lose_the_gradient():
    a, b, *_ = mixed_operands(M, N, K, dtype=F32)
    gemmtune.mixed_mm(a, b)
    assert gemmtune.mixed_mm(a.requires_grad_(), b).requires_grad
    with torch.no_grad():
        assert not gemmtune.mixed_mm(a, b).requires_grad


def test_mixed_mm_under_autocast():
    a, b, scale, _, weights = mixed_operands(M, N, K, dtype=F32, scales="column")
    gemmtune.mixed_mm(a, b, scale_b=scale)
    with torch.autocast("cpu", dtype=BF16):
        got = gemmtune.mixed_mm(a, b, scale_b=scale)
    assert_close(got, a.double() @ weights, a.double().abs() @ weights.abs(), 2**-6, BF16)
    assert gemmtune.mixed_mm(a, b, scale_b=scale).dtype == F32


def test_autocast_changes_nothing_where_no_operand_is_a_float_of_16_or_32_bits():
    a, b, scale_a, scale_b, want, magnitude = float8_operands(("1x128", "128x1"))
    x, y, exact = int_operands()
    with torch.autocast("cpu", dtype=BF16), settings.patch(choice_denylist_regex=None):
        assert_close(gemmtune.scaled_mm(a, b, scale_a, scale_b, out_dtype=F32), want, magnitude, dtype=F32)
        assert torch.equal(gemmtune.int_mm(x, y).long(), exact)


def test_inside_torch_compile_they_are_torchs_operations():
    x, y, exact = int_operands()
    compiled = torch.compile(lambda a, b, s: gemmtune.int_mm_mul(a, b, s) + 1, backend="eager", fullgraph=True)
    assert_close(compiled(x, y, torch.full((N,), 0.5)), exact * 0.5 + 1, exact.abs(), dtype=F32)
    compiled = torch.compile(lambda a, b: gemmtune.int_mm(a, b), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, y).long(), exact)
    a, b, scale, zero, weights = mixed_operands(M, N, K, dtype=F32, scales="group_32", zeros=True, encoding="int4")
    compiled = torch.compile(
        lambda a, b, s, z: gemmtune.mixed_mm(a, b, scale_b=s, zero_b=z, encoding="int4", epilogue=torch.relu),
        backend="eager",
        fullgraph=True,
    )
    assert_close(compiled(a, b, scale, zero), torch.relu(a.double() @ weights), a.double().abs() @ weights.abs(), dtype=F32)
    a, b, scale_a, scale_b, want, magnitude = float8_operands(("row", "column"))
    bias = floats((N,), F32, 5)
    compiled = torch.compile(
        lambda a, b, s, t, c: gemmtune.scaled_mm(a, b, s, t, bias=c, out_dtype=F32, epilogue=lambda acc: acc.to(F16)),
        backend="eager",
        fullgraph=True,
    )
    assert_close(compiled(a, b, scale_a, scale_b, bias), want + bias.double(), magnitude + 3, dtype=F16)


def test_function_transforms_run_by_torch():
    x, y, exact = int_operands()
    got = torch.func.vmap(lambda a: gemmtune.int_mm(a, y))(torch.stack([x, -x.clamp(-127)]))
    assert torch.equal(got.long(), torch.stack([exact, -x.clamp(-127).long() @ y.long()]))
    a, b, *_, weights = mixed_operands(M, N, K, dtype=F32)
    got = torch.func.vmap(lambda row: gemmtune.mixed_mm(row, b))(torch.stack([a, 2 * a]))
    assert_close(got[1], 2 * a.double() @ weights, 2 * a.double().abs() @ weights.abs())
    _, tangent = torch.func.jvp(lambda t: gemmtune.mixed_mm(t, b), (a,), (a,))
    assert_close(tangent, a.double() @ weights, a.double().abs() @ weights.abs())


class Marked(torch.Tensor):
    """A subclass, as quantization libraries have them."""


def test_subclasses_run_by_torch():
    a, b, *_, weights = mixed_operands(M, N, K, dtype=F32)
    assert_close(
        gemmtune.mixed_mm(a.as_subclass(Marked), b).as_subclass(torch.Tensor),
        a.double() @ weights,
        a.double().abs() @ weights.abs(),
    )
    x, y, scale_a, scale_b, want, magnitude = float8_operands(("1x128", "128x128"))
    got = gemmtune.scaled_mm(x.as_subclass(Marked), y, scale_a, scale_b, epilogue=lambda acc: acc.to(F32))
    assert_close(got.as_subclass(torch.Tensor), want, magnitude, dtype=F32)


def test_the_key_has_everything_that_a_plan_depends_on():
    a, b, scale, _, _ = mixed_operands(M, N, K, dtype=F32, scales="group_32")
    x, y, _ = int_operands()
    p, q, scale_a, scale_b, *_ = float8_operands()

    def plans(call) -> int:
        before = len(ready)
        call()
        return len(ready) - before

    ready.clear()
    assert plans(lambda: gemmtune.mixed_mm(a, b, scale_b=scale)) == 1
    assert plans(lambda: gemmtune.mixed_mm(a, b, scale_b=2 * scale)) == 0
    others = [
        lambda: gemmtune.mixed_mm(a, b),
        lambda: gemmtune.mixed_mm(a, b, scale_b=scale[:1]),
        lambda: gemmtune.mixed_mm(a, b, scale_b=scale.t().contiguous().t()),
        lambda: gemmtune.mixed_mm(a, b, scale_b=scale, zero_b=scale),
        lambda: gemmtune.mixed_mm(a, b.to(torch.uint8), scale_b=scale),
        lambda: gemmtune.mixed_mm(a.half(), b, scale_b=scale),
        lambda: gemmtune.mixed_mm(a[:, : 2 * (K // 2)], b[: K // 2].to(torch.uint8), encoding="int4"),
        lambda: gemmtune.mixed_mm(a[:, : 2 * (K // 2)], b[: K // 2].to(torch.uint8), encoding="uint4"),
        lambda: gemmtune.mixed_mm(a, gemmtune.prepack(b), scale_b=scale),
        lambda: gemmtune.int_mm(x, y),
        lambda: gemmtune.int_mm_mul(x, y, torch.ones(N)),
        lambda: gemmtune.int_mm_mul(x, y, torch.ones(M, 1)),
        lambda: gemmtune.int_mm_mul(x, y, torch.ones(N), out_dtype=F16),
        lambda: gemmtune.int_mm_mul(x, y, torch.ones(N).half()),
        lambda: gemmtune.scaled_mm(p, q, scale_a, scale_b),
        lambda: gemmtune.scaled_mm(p, q, scale_a, scale_b, out_dtype=F32),
        lambda: gemmtune.scaled_mm(p, q, scale_a, scale_b, fast_accum=True),
        lambda: gemmtune.scaled_mm(p, q, scale_a.reshape(1, 1), scale_b),
        lambda: gemmtune.scaled_mm(p, q, torch.ones(M, 1), torch.ones(1, N)),
        lambda: gemmtune.scaled_mm(p, q, scale_a, scale_b, bias=torch.ones(N)),
        lambda: gemmtune.scaled_mm(p, q, scale_a, scale_b, bias=torch.ones(M, 1)),
    ]  # fmt: skip
    for i, call in enumerate(others):
        assert plans(call) == 1, i
        assert plans(call) == 0, i


def test_a_call_with_the_same_key_has_its_own_numbers():
    a, b, scale_a, scale_b, want, magnitude = float8_operands()
    bias = floats((N,), F32, 5)
    gemmtune.scaled_mm(a, b, scale_a, scale_b, bias=bias)
    got = gemmtune.scaled_mm(a, b, 2 * scale_a, scale_b, bias=-bias)
    assert_close(got, 2 * want - bias.double(), 2 * magnitude + 3, 2**-7, BF16)


def test_out_must_take_the_result_and_share_no_memory():
    a, b, _ = int_operands()
    with pytest.raises(InvalidProblemError, match=r"int_mm: out must have dtype torch.int32, got torch.float32"):
        gemmtune.int_mm(a, b, out=torch.empty(M, N))
    with pytest.raises(InvalidProblemError, match=r"int_mm_mul: out must have shape \[9, 20\], got \[20, 9\]"):
        gemmtune.int_mm_mul(a, b, torch.ones(N), out=torch.empty(N, M))
    scale = torch.ones(M, N)
    with pytest.raises(InvalidProblemError, match="int_mm_mul: out shares memory with scale; give an out of its own"):
        gemmtune.int_mm_mul(a, b, scale, out=scale)


def test_explain_names_the_pick():
    a, b, scale, _, _ = mixed_operands(M, N, K, dtype=F32, scales="column")
    explained = gemmtune.explain(gemmtune.mixed_mm, a, b, scale_b=scale)
    assert (explained.pick, explained.origin) == ("aten:mixed_mm", "the only choice")
    assert str(explained.problem) == "mixed_mm 9x20x70 float32 nn b int8 scale_b[-x1] on cpu"
    x, y, _ = int_operands()
    explained = gemmtune.explain("int_mm_mul", x, y, torch.ones(N), out_dtype=F16)
    assert (explained.pick, explained.problem.out.dtype) == ("aten:_int_mm+eager", F16)
    p, q, scale_a, scale_b, *_ = float8_operands()
    assert gemmtune.explain("scaled_mm", p, q, scale_a, scale_b, bias=torch.ones(N)).pick == "aten:_scaled_mm+eager"


def test_a_new_packed_copy_on_a_gpu_takes_the_memory_of_the_old_one(monkeypatch: pytest.MonkeyPatch):
    """A CUDA graph may read it; other streams may as soon as it is there."""
    waited: list[torch.device] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    old, new = torch.zeros(3, 4), torch.ones(3, 4)
    assert _in_place_of(old, new) is old
    assert torch.equal(old, new)
    assert _in_place_of(None, new) is new
    other = torch.ones(2, 2)
    assert _in_place_of(old, other) is other
    assert len(waited) == 3
