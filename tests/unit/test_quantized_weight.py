"""QuantizedWeight: what quantize makes, what the parts have to be, and that the operations take it for its parts."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import re
from collections import Counter
from typing import get_args

import pytest
import torch

import gemmtune
from gemmtune import QuantizedWeight, settings
from gemmtune.errors import InvalidProblemError
from gemmtune.quantized import rounding
from gemmtune.quantized.rounding import Kind

WEIGHT = torch.randn(256, 96, generator=torch.Generator().manual_seed(1))
A = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(search="quick", backends=("aten",)):
        yield


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("scales", ["tensor", "column", "group_32", "group_64", "group_128"])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_are_the_nearest_and_products_those_of_the_parts(kind, scales, transposed):
    given = WEIGHT.t().contiguous().t() if transposed else WEIGHT
    weight = QuantizedWeight.quantize(given, kind, scales=scales)
    assert (weight.shape, weight.scales.dtype) == (WEIGHT.shape, torch.float32)
    assert weight.tensor.t().is_contiguous() == transposed
    assert (weight.zero_points is not None) == kind.startswith("u")
    step = weight.scales if weight.scales.numel() == 1 else weight.scales.repeat_interleave(256 // weight.scales.shape[0], 0)
    floats = {"float8_e4m3fn": WEIGHT.abs() / 16 + step / 2**10, "float8_e5m2": WEIGHT.abs() / 8 + step / 2**17}
    # A zero point is rounded too, which may move an end of the range by half a step.
    most = floats.get(kind, step if kind.startswith("u") else step / 2)
    assert ((weight.dequantize() - WEIGHT).abs() <= most * 1.001).all()
    expected = gemmtune.mixed_mm(A, weight.tensor, scale_b=weight.scales, zero_b=weight.zero_points, encoding=weight.encoding)
    for _ in range(2):
        assert torch.equal(gemmtune.mixed_mm(A, weight), expected)
    assert torch.allclose(expected, A @ weight.dequantize(), atol=1e-3)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["grouped_mm", "routed_grouped_mm", "combined_grouped_mm"])
def test_grouped_operators_take_experts(name, kind):
    """Three experts serve the pairs of four tokens and two places each."""
    experts, offs = torch.stack([WEIGHT, 2 * WEIGHT, -WEIGHT]), torch.tensor([3, 4, 8], dtype=torch.int32)
    tokens, places = torch.randn(4, 256), torch.tensor([3, 0, 2, 1, 7, 5, 4, 6])
    a, more = {
        "grouped_mm": (tokens[places // 2], ()),
        "routed_grouped_mm": (tokens, (places // 2,)),
        "combined_grouped_mm": (tokens[places // 2], (places, torch.rand(4, 2))),
    }[name]
    weight, operator = QuantizedWeight.quantize(experts, kind), getattr(torch.ops.gemmtune, name)
    result, expected = operator(a, weight, offs, *more), operator(a, weight.dequantize(), offs, *more)
    rough = 0.1 if kind.startswith("float8") else 1e-4  # a is rounded to 8 bits too
    assert torch.allclose(result, expected, rtol=rough, atol=rough * float(expected.abs().max()))


@pytest.mark.parametrize("scales", ["tensor", "column", "group_128", "block_128x128"])
def test_scaled_mm_takes_8_bit_floats_with_their_scale(scales):
    weight = QuantizedWeight.quantize(WEIGHT, "float8_e4m3fn", scales=scales)
    a = A.to(torch.float8_e4m3fn)
    shape = {"tensor": (), "column": (5, 1)}.get(scales, (5, 2))
    scale_a = torch.rand(shape) + 0.5
    for _ in range(2):
        result = gemmtune.scaled_mm(a, weight, scale_a, out_dtype=torch.float32)
        assert torch.equal(result, gemmtune.scaled_mm(a, weight.tensor, scale_a, weight.scales, out_dtype=torch.float32))
    spread = scale_a.repeat_interleave(128, 1) if shape == (5, 2) else scale_a
    assert torch.allclose(result, (a.float() * spread) @ weight.dequantize(), rtol=1e-3, atol=1e-2)


def test_a_last_group_that_is_not_full_zeros_and_the_scales_dtype():
    weight = torch.cat([WEIGHT[:200].half(), torch.zeros(200, 1).half()], 1)
    found = QuantizedWeight.quantize(weight, "int4", scales="group_64")
    assert (tuple(found.scales.shape), found.scales.dtype) == ((4, 97), torch.float16)
    assert (found.dequantize()[:, 96] == 0).all()
    assert torch.equal(gemmtune.mixed_mm(A[:, :200].half(), found)[:, 96], torch.zeros(5).half())
    assert QuantizedWeight.quantize(weight, "int4", scale_dtype=torch.float32).scales.dtype == torch.float32


def test_the_range_has_zero_in_it_and_its_ends():
    weight = torch.tensor([[3.0, -1.0], [9.0, 2.0]])
    found = QuantizedWeight.quantize(weight, "uint8")
    assert torch.allclose(found.dequantize(), weight, atol=9 / 255)
    assert torch.equal(found.zero_points, torch.tensor([[0.0, 85.0]]))
    signed = QuantizedWeight.quantize(torch.tensor([[-127.0, 1.0], [3.0, -1.0]]))
    assert torch.equal(signed.tensor, torch.tensor([[-127, 127], [3, -127]], dtype=torch.int8))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved, lambda x: x.to("cpu")])
@pytest.mark.parametrize("prepacked", [False, True])
def test_it_can_be_copied_moved_saved_and_prepacked(again, prepacked):
    weight = QuantizedWeight.quantize(WEIGHT, "uint4", scales="group_32")
    expected = gemmtune.mixed_mm(A, weight)
    copied = again(gemmtune.prepack(weight, op="mixed_mm") if prepacked else weight)
    assert isinstance(copied.numbers, gemmtune.PackedOperand) == prepacked
    assert torch.equal(gemmtune.mixed_mm(A, copied), expected)
    assert (copied.shape, copied.nbytes) == (WEIGHT.shape, 128 * 96 + 2 * 8 * 96 * 4)
    text = ", prepacked" if prepacked else ""
    assert repr(copied) == f"QuantizedWeight([256, 96] uint4, scales [8, 96] float32, zero points{text}, cpu)"


def test_the_type_of_a_parameter_makes_a_parameter():
    weight = torch.nn.Parameter(QuantizedWeight.quantize(WEIGHT), requires_grad=False)
    again = type(weight)(weight.to("meta"), requires_grad=weight.requires_grad)
    assert isinstance(again, torch.nn.Parameter)
    assert (type(again), again.requires_grad, again.device.type) == (QuantizedWeight, False, "meta")


def test_the_place_of_a_weight_tells_it_from_others():
    weight, other = QuantizedWeight.quantize(WEIGHT), QuantizedWeight.quantize(WEIGHT)
    assert weight.data_ptr() == weight.t().data_ptr() != other.data_ptr()
    assert weight.data_ptr() >> 63 == 1, "no address"
    assert weight.to("meta").data_ptr() == 0
    with pytest.raises(InvalidProblemError, match=r"storage: got a QuantizedWeight of shape \[256, 96\], .*flatten_state_dict"):
        weight.storage()


def test_gradients_of_the_other_operand_and_explanations():
    weight, a = QuantizedWeight.quantize(WEIGHT, "int8"), A.clone().requires_grad_()
    gemmtune.mixed_mm(a, weight).sum().backward()
    assert torch.allclose(a.grad, weight.dequantize().sum(1).expand(5, 256), atol=1e-3)
    assert gemmtune.explain("mixed_mm", A, weight).problem.scale_b is not None


def test_inside_of_torch_compile():
    weight = QuantizedWeight.quantize(WEIGHT, "float8_e4m3fn")
    mixed = torch.compile(lambda a: gemmtune.mixed_mm(a, weight), backend="eager", fullgraph=True)
    scaled = torch.compile(lambda a: gemmtune.scaled_mm(a, weight, torch.ones(5, 1)), backend="eager", fullgraph=True)
    assert torch.allclose(mixed(A), A @ weight.dequantize(), atol=1e-3)
    assert torch.equal(scaled(FLOAT8_A), gemmtune.scaled_mm(FLOAT8_A, weight, torch.ones(5, 1)))


def traced_layer() -> torch.nn.Module:
    return gemmtune.quantize_(torch.nn.Sequential(torch.nn.Linear(A.shape[1], 64)), "int8").requires_grad_(False)


INT8, UINT8, ONE = torch.zeros(6, 4, dtype=torch.int8), torch.zeros(6, 4, dtype=torch.uint8), torch.ones(())
FLOAT8_A, FLOAT8 = A.to(torch.float8_e4m3fn), WEIGHT.to(torch.float8_e4m3fn)
BAD = {
    "numbers": (lambda: QuantizedWeight(WEIGHT), r"numbers: got torch.float32 of shape \[256, 96\], expected a 2-D tensor of int8"),
    "no numbers": (lambda: QuantizedWeight(None), "numbers: got NoneType, expected a 2-D tensor of int8, uint8, float8_e4m3fn"),
    "encoding": (lambda: QuantizedWeight(UINT8, encoding="int3"), "encoding: got 'int3', expected one of '', 'int4', 'uint4'"),
    "packed": (lambda: QuantizedWeight(INT8, encoding="int4"), "numbers: got torch.int8 .*, expected a 2-D tensor of uint8"),
    "zeros alone": (lambda: QuantizedWeight(INT8, zero_points=ONE), "got zero_points without scales"),
    "zeros of floats": (lambda: QuantizedWeight(FLOAT8, ONE, ONE), "got zero_points without scales or for 8-bit floats"),
    "shape": (
        lambda: QuantizedWeight(UINT8, torch.ones(4), encoding="int4"),
        r"scales: got shape \[4\] for a weight \[12, 4\], expected \[1, 1\] or \[1, 4\]",
    ),
    "zeros' shape": (lambda: QuantizedWeight(INT8, ONE, torch.ones(6, 1)), r"zero_points: got shape \[6, 1\] for a weight \[6, 4"),
    "square": (lambda: QuantizedWeight(torch.zeros(256, 256).to(torch.int8), torch.ones(2, 2)), r"scales: got shape \[2, 2\]"),
    "dtype": (lambda: QuantizedWeight(INT8, ONE.double()), "scales: got torch.float64, expected a tensor of float32, float16 or"),
    "no tensor": (lambda: QuantizedWeight(INT8, 0.5), "scales: got float, expected a tensor of float32"),
    "device": (lambda: QuantizedWeight(INT8, ONE.to("meta")), "scales: got one on meta, expected cpu; move one of them"),
    "kind": (lambda: QuantizedWeight.quantize(WEIGHT, "int3"), "quantize: kind: got 'int3', expected one of int8, uint8, int4"),
    "integers": (lambda: QuantizedWeight.quantize(INT8), "quantize: weight: got torch.int8 of shape .*, expected a tensor"),
    "empty": (lambda: QuantizedWeight.quantize(WEIGHT[:0]), r"quantize: weight: got torch.float32 of shape \[0, 96\], expected"),
    "odd": (lambda: QuantizedWeight.quantize(WEIGHT[:5], "int4"), "quantize: weight: got 5 rows, expected an even number for int4"),
    "infinite": (lambda: QuantizedWeight.quantize(WEIGHT / 0), "quantize: weight: got infinity or NaN, expected finite numbers"),
    "scales": (lambda: QuantizedWeight.quantize(WEIGHT, scales="row"), "quantize: scales: got 'row' for int8, expected one of"),
    "blocks": (lambda: QuantizedWeight.quantize(WEIGHT, scales="block_128x128"), "scales: got 'block_128x128' for int8"),
    "requires_grad": (
        lambda: QuantizedWeight(INT8, requires_grad=False),
        "requires_grad: got False with parts of a weight, expected a QuantizedWeight; make the weight, and give it to nn.Parameter",
    ),
    "beside it": (
        lambda: gemmtune.mixed_mm(A, QuantizedWeight.quantize(WEIGHT), scale_b=ONE, encoding="int4"),
        "mixed_mm: got scale_b and encoding beside a QuantizedWeight, expected it alone: it has its own",
    ),
    "integers scaled": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, QuantizedWeight.quantize(WEIGHT, "uint4"), ONE),
        "scaled_mm: b: got uint4, expected 8-bit floats; mixed_mm multiplies integers",
    ),
    "traced": (
        lambda: torch.jit.trace(traced_layer(), (A,)),
        "torch.jit.trace: got a QuantizedWeight, which TorchScript cannot hold; use torch.export.export",
    ),
    "no scale": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8, ONE),
        "scaled_mm: scale_b: got None, expected a tensor, or b as a QuantizedWeight with scales",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", BAD)
def test_message(name):
    call, message = BAD[name]
    with pytest.raises(InvalidProblemError, match=message):
        call()


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def test_quantize_gives_finite_weights_or_refuses():
    """Every kind, scale dtype and magnitude up to the largest number of the weight's dtype."""
    torch.manual_seed(0)
    shape = torch.rand(64, 4, dtype=torch.float64) * 2 - 1
    shape[0], shape[1] = 1, -1
    refused: Counter[str] = Counter()
    for dtype, scale_dtype, kind, scales, magnitude in itertools.product(
        FLOATS, (None, *FLOATS[1:]), get_args(Kind), ("tensor", "column", "group_32"), (1e-30, 6e-8, 1.0, 3e7, math.inf)
    ):
        exact = shape * min(magnitude, torch.finfo(dtype).max)
        weight = exact.to(dtype)
        try:
            found = QuantizedWeight.quantize(weight, kind, scales=scales, scale_dtype=scale_dtype).dequantize()
        except InvalidProblemError as error:
            refused[re.search(r"which overflows [\w.]+", str(error))[0]] += 1
            continue
        where = f"{kind} of {dtype} up to {magnitude} by {scales} in {scale_dtype}"
        assert found.isfinite().all(), where
        if magnitude >= 1:
            error = (found.double() - weight.double()).abs().max() / weight.double().abs().max()
            assert error < (0.14 if "4" in kind or "e5m2" in kind else 0.04), f"{where}: {error}"
    assert refused.keys() == {f"which overflows {name}" for name in ("torch.float16", "torch.bfloat16", "torch.float32")}


@pytest.mark.parametrize("kind", ["int8", "uint4", "float8_e5m2"])
@pytest.mark.parametrize("transposed", [False, True])
def test_columns_are_rounded_alike_in_pieces_and_at_once(kind, transposed, monkeypatch):
    weight = torch.randn(40, 130, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight = weight.t().contiguous().t() if transposed else weight
    whole = rounding.rounded(weight, kind, "group_32", torch.float32)
    monkeypatch.setattr(rounding, "_CACHED", 40 * 33)
    pieces = rounding.rounded(weight, kind, "group_32", torch.float32)
    assert pieces.numbers.stride() == whole.numbers.stride()
    for x, y in zip(whole[:3], pieces[:3], strict=True):
        assert (x is None and y is None) or torch.equal(x.float(), y.float())


def test_quantize_says_which_scale_dtype_to_give():
    with pytest.raises(
        InvalidProblemError, match=r"got a scale of 2\.36e\+05, which overflows torch.float16; give another scale_dtype"
    ):
        QuantizedWeight.quantize(torch.full((4, 4), 3e7), "int8", scale_dtype=torch.float16)
