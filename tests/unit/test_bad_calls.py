"""Every bad call says what was got, what was expected and what to do."""

from __future__ import annotations

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.scalars import number
from gemmtune.errors import InvalidProblemError


@pytest.fixture(autouse=True)
def quick(own_store):
    with settings.patch(search="quick", backends=("aten",)):
        yield


A, B, BATCH = torch.ones(4, 3), torch.ones(3, 5), torch.ones(2, 4, 3)
WIDE = torch.ones(8, 16)
INT8, WEIGHT, ONE = torch.ones(4, 3, dtype=torch.int8), torch.ones(3, 5, dtype=torch.int8), torch.ones(())
FLOAT8_A, FLOAT8_B = A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn)

FACTORS: dict[str, tuple[object, bool, complex | str]] = {
    "real": (2 + 0j, False, 2.0),
    "of complex operands": (2 + 1j, True, 2 + 1j),
    "real number of complex operands": (2 + 0j, True, 2.0),
    "complex": (2 + 1j, False, "got (2+1j), expected a number"),
    "tensor": (torch.tensor([3.0]), False, 3.0),
    "tensor of two": (torch.ones(2), False, "got a tensor of shape [2], expected a number"),
    "tensor with gradient": (torch.ones(1, requires_grad=True), False, "got a tensor of shape [1], expected a number"),
    "numpy": (np.float32(0.5), False, 0.5),
    "text": ("2", False, "got '2', expected a number"),
    "largest integer": (2**64 - 1, False, 2**64 - 1),
    "larger integer": (2**64, False, "got an integer of 65 bits, expected one of at most 64; give a float"),
    "least integer": (-(2**63), False, -(2**63)),
    "lesser integer": (-(2**63) - 1, False, "got an integer of 64 bits, expected one of at most 64; give a float"),
}
"""By name: a factor, whether the operands are complex, and the number that is taken or the words of the error."""


@pytest.mark.parametrize(("given", "of_complex", "expected"), FACTORS.values(), ids=FACTORS)
def test_a_factor_is_a_number_or_an_error(given, of_complex, expected):
    if isinstance(expected, str):
        with pytest.raises(InvalidProblemError, match=re.escape(f"mm: alpha: {expected}")):
            number("mm", "alpha", given, of_complex=of_complex)
    else:
        found = number("mm", "alpha", given, of_complex=of_complex)
        assert (found, type(found)) == (expected, type(expected))


BAD_CALLS = {
    "inner sizes": (
        lambda: gemmtune.mm(A, A),
        r"mm: shapes do not fit, got a \[4, 3\] and b \[4, 3\]; expected a \[M, K\] and b \[K, N\]",
    ),
    "batch sizes": (
        lambda: gemmtune.bmm(BATCH, torch.ones(3, 3, 5)),
        r"bmm: shapes do not fit, got a \[2, 4, 3\] and b \[3, 3, 5\]",
    ),
    "1-D": (lambda: gemmtune.mm(A[0], B), r"mm: a must be a 2-D tensor, got shape \[3\]"),
    "3-D for mm": (lambda: gemmtune.mm(BATCH, B), r"mm: a must be a 2-D tensor, got shape \[2, 4, 3\]"),
    "2-D for bmm": (lambda: gemmtune.bmm(A, B), r"bmm: a must be a 3-D tensor, got shape \[4, 3\]"),
    "dtypes": (
        lambda: gemmtune.mm(A, B.half()),
        "mm: a and b must have the same dtype, got torch.float32 and torch.float16; cast one of them",
    ),
    "no tensor": (lambda: gemmtune.mm(A, [[1.0]]), "mm: b must be a torch.Tensor, got list"),
    "devices": (
        lambda: gemmtune.mm(A, B.to("meta")),
        "all operands must be on one device, got a on cpu and b on meta; move one of them",
    ),
    "inp shape": (
        lambda: gemmtune.addmm(torch.ones(4), A, B),
        r"got an operand of shape \(4,\), expected one that broadcasts to \(4, 5\)",
    ),
    "inp dtype": (
        lambda: gemmtune.addmm(torch.ones(5).half(), A, B),
        "addmm: a and inp must have the same dtype, got torch.float32 and torch.float16; cast one of them",
    ),
    "out shape": (lambda: gemmtune.mm(A, B, out=torch.empty(5, 4)), r"mm: out must have shape \[4, 5\], got \[5, 4\]"),
    "out dtype": (
        lambda: gemmtune.mm(A, B, out=torch.empty(4, 5).half()),
        "mm: out must have dtype torch.float32, got torch.float16",
    ),
    "out device": (
        lambda: gemmtune.mm(A, B, out=torch.empty(4, 5, device="meta")),
        "got a on cpu and out on meta; move one of them",
    ),
    "out type": (lambda: gemmtune.mm(A, B, out=3), "mm: out must be a torch.Tensor, got int"),
    "out is an input": (
        lambda: gemmtune.mm(WIDE[:, :8], WIDE[:, :8], out=WIDE[:, :8]),
        "mm: out shares memory with a; give an out of its own",
    ),
    "out overlaps itself": (lambda: gemmtune.mm(A, B, out=torch.empty(5).expand(4, 5)), "several elements of out share memory"),
    "epilogue number": (
        lambda: gemmtune.mm(A, B, epilogue=torch.mul, epilogue_args=(2.5,)),
        r"mm: epilogue_args\[0\] must be a torch.Tensor, got float; a number is part of the function",
    ),
    "epilogue args": (lambda: gemmtune.mm(A, B, epilogue_args=(A,)), "mm: got 1 epilogue_args without an epilogue"),
    "epilogue shape": (
        lambda: gemmtune.mm(A, B, epilogue=lambda x, y: x + y, epilogue_args=(torch.ones(7),)),
        r"epilogue_args\[0\]: got an operand of shape \(7,\), expected one that broadcasts to \(4, 5\)",
    ),
    "prepack": (lambda: gemmtune.prepack(BATCH), r"prepack: b must be a 2-D tensor \[K, N\], got a 3-D tensor"),
    "prepacked bmm": (lambda: gemmtune.bmm(BATCH, gemmtune.prepack(B)), "bmm: b must be a torch.Tensor, got a prepacked operand"),
    "explain": (
        lambda: gemmtune.explain("conv", A, B),
        "explain: got op 'conv', expected a Problem, or one of mm, addmm, bmm, baddbmm, ",
    ),
    "explain a module": (
        lambda: gemmtune.explain(torch.nn.Linear(2, 2)),
        r"explain: got a Linear, which is no product: for all its layers call compiled = torch.compile",
    ),
    "explain an object": (
        lambda: gemmtune.explain(object()),
        "explain: got a object, expected a Problem, or one of mm, .* with its tensors, or what torch.compile returned",
    ),
    "tune a module": (
        lambda: gemmtune.tune(torch.nn.Linear(2, 2)),
        r"tune: got a Linear, which is no product: optimize\(model, tune=inputs\) tunes its layers",
    ),
    "explain count": (lambda: gemmtune.explain("addmm", A, B), "explain: addmm: missing a required argument: 'b'"),
    "tune": (lambda: gemmtune.tune([3]), "tune: expected a Problem or several, got int"),
    "tune nothing": (lambda: gemmtune.tune(None), "tune: expected a Problem or several, got NoneType; make one with"),
    "tune text": (
        lambda: gemmtune.tune("16x16x16"),
        "tune: got op '16x16x16', expected a Problem, or one of mm, addmm, .* with its tensors",
    ),
    "tune without tensors": (lambda: gemmtune.tune("mm"), "tune: mm: missing a required argument: 'a'"),
    "tune what torch does": (
        lambda: gemmtune.tune("mm", A.to_sparse(), B),
        "tune: torch alone can do this call, because the layout is torch.sparse_coo; there is nothing to choose from",
    ),
    "tune of both": (lambda: gemmtune.tune(gemmtune.Problem.mm(4, 5, 3), A), "tune: got operands beside a Problem"),
    "explain both": (lambda: gemmtune.explain(gemmtune.Problem.mm(4, 5, 3), A), "explain: got operands beside a Problem"),
    "two factors": (
        lambda: gemmtune.addmm(A[:, :1], A, B, alpha=torch.ones(2)),
        r"addmm: alpha: got a tensor of shape \[2\], expected a number, or a real tensor of one element without gradient",
    ),
    "factor text": (lambda: gemmtune.baddbmm(ONE, BATCH, BATCH.mT, beta="1"), "baddbmm: beta: got '1', expected a number, or a"),
    "epilogue args of numpy": (
        lambda: [gemmtune.mm(A, B), gemmtune.mm(A, B, epilogue_args=A.numpy())],
        "mm: epilogue_args: got ndarray, expected a tuple or list of tensors",
    ),
    "epilogue args of a call that was planned": (
        lambda: [gemmtune.mm(A, B), gemmtune.mm(A, B, epilogue_args=[ONE])],
        "mm: got 1 epilogue_args without an epilogue, expected both or neither",
    ),
    "mixed_mm epilogue args of a call that was planned": (
        lambda: [gemmtune.mixed_mm(A, WEIGHT), gemmtune.mixed_mm(A, WEIGHT, epilogue_args=[ONE])],
        "mixed_mm: got 1 epilogue_args without an epilogue, expected both or neither",
    ),
    "epilogue args as a tensor": (
        lambda: gemmtune.mm(A, B, epilogue=torch.add, epilogue_args=ONE),
        r"mm: epilogue_args: got Tensor, expected a tuple or list of tensors, such as \(bias,\)",
    ),
    "nested": (
        lambda: gemmtune.mm(torch.nested.nested_tensor([A, A]), B),
        "mm: a: got a nested tensor, expected a plain one; pad it, or multiply its parts",
    ),
    "quantized by torch": (
        lambda: gemmtune.mm(A, torch.quantize_per_tensor(B, 0.1, 0, torch.qint8)),
        r"mm: b: got a tensor of torch.qint8, expected one of plain numbers; give x.dequantize\(\), or x.int_repr\(\) to mixed_mm",
    ),
    "fake and real": (
        lambda: gemmtune.mm(A, FakeTensorMode().from_tensor(B)),
        "mm: torch has to do it, because FakeTensor is a subclass of Tensor, and refuses: Please convert all Tensors to",
    ),
    "sparse": (
        lambda: gemmtune.int_mm(INT8.to_sparse(), WEIGHT),
        "int_mm: torch has to do it, because the layout is torch.sparse_coo, and refuses: .*; give dense tensors",
    ),
    "sparse out": (
        lambda: gemmtune.mm(A, B, out=torch.ones(4, 5).to_sparse()),
        "mm: out must be a dense tensor with memory, got Tensor of layout torch.sparse_coo",
    ),
    "int_mm of floats": (lambda: gemmtune.int_mm(A, B), "int_mm: dtype of a: got torch.float32, expected int8"),
    "int_mm shapes": (lambda: gemmtune.int_mm(INT8, INT8), r"int_mm: shapes do not fit, got a \[4, 3\] and b \[4, 3\]"),
    "int_mm rank": (lambda: gemmtune.int_mm(INT8[0], WEIGHT), r"int_mm: a must be a 2-D tensor, got shape \[3\]"),
    "int_mm out": (
        lambda: gemmtune.int_mm(INT8, WEIGHT, out=torch.empty(4, 5)),
        "int_mm: out must have dtype torch.int32, got torch.float32",
    ),
    "int_mm epilogue args": (lambda: gemmtune.int_mm(INT8, WEIGHT, epilogue_args=(A,)), "int_mm: got 1 epilogue_args without an"),
    "factor type": (lambda: gemmtune.int_mm_mul(INT8, WEIGHT, 0.5), "int_mm_mul: scale must be a torch.Tensor, got float"),
    "factor dtype": (
        lambda: gemmtune.int_mm_mul(INT8, WEIGHT, ONE.double()),
        "int_mm_mul: dtype of scale: got torch.float64, expected one of float32, float16, bfloat16; cast it first",
    ),
    "factor shape": (
        lambda: gemmtune.int_mm_mul(INT8, WEIGHT, torch.ones(4)),
        r"int_mm_mul: scale: got an operand of shape \(4,\), expected one that broadcasts to \(4, 5\)",
    ),
    "factor's gradient": (
        lambda: gemmtune.int_mm_mul(INT8, WEIGHT, torch.ones(5, requires_grad=True)),
        r"int_mm_mul: scale requires grad, but the operation has no gradient; detach it, or use torch.no_grad\(\)",
    ),
    "result dtype": (
        lambda: gemmtune.int_mm_mul(INT8, WEIGHT, ONE, out_dtype="float16"),
        "int_mm_mul: out_dtype: got 'float16', expected one of float32, float16, bfloat16",
    ),
    "result of doubles": (
        lambda: gemmtune.int_mm_mul(INT8, WEIGHT, ONE, out_dtype=torch.float64),
        "int_mm_mul: out_dtype: got torch.float64, expected one of float32, float16, bfloat16",
    ),
    "mixed_mm of doubles": (
        lambda: gemmtune.mixed_mm(A.double(), WEIGHT),
        "mixed_mm: dtype of a: got torch.float64, expected one of float32, float16, bfloat16",
    ),
    "mixed_mm of floats": (
        lambda: gemmtune.mixed_mm(A, B),
        "mixed_mm: dtype of b: got torch.float32, expected one of int8, uint8, float8_e4m3fn, float8_e5m2",
    ),
    "weight scale": (
        lambda: gemmtune.mixed_mm(A, WEIGHT, scale_b=torch.ones(5)),
        r"mixed_mm: scale_b must have one element or shape \[1, 5\], got \[5\]",
    ),
    "weight zero": (
        lambda: gemmtune.mixed_mm(A, WEIGHT, zero_b=ONE),
        r"mixed_mm: got zero_b without scale_b, expected both: b is read as \(b - zero_b\) \* scale_b",
    ),
    "encoding": (
        lambda: gemmtune.mixed_mm(A, WEIGHT.to(torch.uint8), encoding="int3"),
        "mixed_mm: encoding: got 'int3', expected one of '', 'int4', 'uint4'",
    ),
    "packed weights": (
        lambda: gemmtune.mixed_mm(A, WEIGHT.to(torch.uint8), encoding="int4"),
        r"mixed_mm: shapes do not fit, got a \[4, 3\] and b \[6, 5\] \(two rows in each byte\)",
    ),
    "mixed_mm out with a gradient": (
        lambda: gemmtune.mixed_mm(A.clone().requires_grad_(), WEIGHT, out=torch.empty(4, 5)),
        "mixed_mm: a call with out= is not differentiable, but an input requires grad",
    ),
    "a gradient of what does not fit": (
        lambda: gemmtune.mixed_mm(A.clone().requires_grad_(), WEIGHT, scale_b=torch.ones(5)),
        r"mixed_mm: scale_b must have one element or shape \[1, 5\], got \[5\]",
    ),
    "scaled_mm of floats": (
        lambda: gemmtune.scaled_mm(A, FLOAT8_B, ONE, ONE),
        "scaled_mm: dtype of a: got torch.float32, expected one of float8_e4m3fn, float8_e5m2",
    ),
    "scaled_mm without a scale": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8_B, ONE),
        "scaled_mm: scale_b: got None, expected a tensor, or b as a QuantizedWeight with scales",
    ),
    "scale type": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8_B, 1.0, ONE),
        "scaled_mm: scale_a must be a torch.Tensor, got float",
    ),
    "scale dtype": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8_B, ONE, ONE.half()),
        "scaled_mm: dtype of scale_b: got torch.float16, expected float32",
    ),
    "scale shape": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8_B, torch.ones(4), ONE),
        r"scaled_mm: scale_a must have one element or shape \[4, 1\] or \[1, 1\], got \[4\]",
    ),
    "bias dtype": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8_B, ONE, ONE, bias=torch.ones(5, dtype=torch.int32)),
        "scaled_mm: dtype of bias: got torch.int32, expected one of float64, float32, float16, bfloat16",
    ),
    "bias shape": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8_B, ONE, ONE, bias=torch.ones(4)),
        r"scaled_mm: bias: got an operand of shape \(4,\), expected one that broadcasts to \(4, 5\)",
    ),
    "scaled_mm's gradient": (
        lambda: gemmtune.scaled_mm(FLOAT8_A, FLOAT8_B, ONE, ONE, bias=torch.ones(5, requires_grad=True)),
        "scaled_mm: bias requires grad, but the operation has no gradient",
    ),
    "packing shape": (lambda: gemmtune.pack_int4(WEIGHT), r"weight must be a 2-D tensor \[K, N\] with even K, got shape \[3, 5\]"),
    "packing dtype": (
        lambda: gemmtune.pack_int4(WIDE),
        "weight must have an integer dtype, got torch.float32; round it and cast it",
    ),
    "packing range": (
        lambda: gemmtune.pack_int4(torch.tensor([[-9], [3]])),
        "pack_int4: int4 has numbers from -8 to 7, got -9 to 3; clamp them",
    ),
    "packing encoding": (
        lambda: gemmtune.pack_int4(INT8, encoding=""),
        "pack_int4: encoding: got '', expected one of int4, uint4",
    ),
    "unpacking": (
        lambda: gemmtune.unpack_int4(INT8),
        r"unpack_int4: expected a uint8 tensor \[K/2, N\], got torch.int8 of shape \[4, 3\]",
    ),
    "prepack op": (lambda: gemmtune.prepack(B, op="bmm"), "prepack: op: got 'bmm', expected one of mm, addmm, int_mm"),
    "prepack dtype": (
        lambda: gemmtune.prepack(B, op="mixed_mm"),
        "prepack: dtype of b: got torch.float32, expected for mixed_mm one of int8, uint8, float8_e4m3fn, float8_e5m2",
    ),
    "explain arguments": (
        lambda: gemmtune.explain("mm", A, B, scale_b=ONE),
        "explain: mm: got an unexpected keyword argument 'scale_b'",
    ),
    "a setting as an argument": (
        lambda: gemmtune.tune("mm", A, B, extra_choices=["mylib.ops:matmul"]),
        r"tune: extra_choices is a setting; gemmtune.settings.patch\(extra_choices=...\) sets it for a while",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_message(name: str):
    call, message = BAD_CALLS[name]
    with pytest.raises(InvalidProblemError, match=message):
        call()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_bad_shapes_are_what_torch_callers_catch(kind: type[Exception]):
    with pytest.raises(kind):
        gemmtune.mm(A, A)


def test_operands_without_memory_are_not_read():
    inp = torch.ones(4, 5)
    calls = (
        (A, lambda x: gemmtune.addmm(inp, x, B)),
        (B, lambda x: gemmtune.addmm(inp, A, x)),
        (B, lambda x: gemmtune.mm(A, gemmtune.prepack(x))),
        (inp, lambda x: gemmtune.addmm(x, A, B)),
        (inp, lambda x: gemmtune.mm(A, B, out=x)),
        (inp, lambda x: gemmtune.mm(A, B, epilogue=torch.add, epilogue_args=(x,))),
        (torch.ones(1, 5), lambda x: gemmtune.mixed_mm(A, WEIGHT, scale_b=x)),
    )
    for whole, call in calls:
        freed = whole.clone()
        call(freed)  # which makes a plan
        freed.untyped_storage().resize_(0)
        with pytest.raises(InvalidProblemError, match="with a storage of 0 bytes, expected its numbers in memory"):
            call(freed)


def test_an_epilogue_that_is_no_function_is_told():
    for wrong in (torch.ones(3, 3), "relu", 5):
        with pytest.raises(gemmtune.EpilogueError, match=f"expected a function of the accumulator, got {type(wrong).__name__}"):
            gemmtune.mm(A, B, epilogue=wrong)


def test_factors_may_be_tensors_of_one_element_whether_a_plan_is_there_or_not():
    for _ in range(2):
        result = gemmtune.addmm(ONE, A, B, alpha=torch.tensor([2.0]), beta=torch.tensor(3))
        assert torch.equal(result, 3 + 2 * (A @ B))


def test_meta_tensors_have_every_operation():
    a, b, float8, one = A.to("meta"), WEIGHT.to("meta"), WIDE.to("meta").to(torch.float8_e4m3fn), ONE.to("meta")
    results = [gemmtune.mm(a, a.t()), gemmtune.mixed_mm(a, b), gemmtune.scaled_mm(float8, float8.t(), one, one)]
    assert [(x.device.type, tuple(x.shape)) for x in results] == [("meta", (4, 4)), ("meta", (4, 5)), ("meta", (8, 8))]


def test_an_epilogue_function_without_a_module_is_one_like_others():
    def double(x):
        return x * 2

    double.__module__ = None
    assert torch.equal(gemmtune.mm(A, B, epilogue=double), 2 * (A @ B))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: saved(x), lambda x: saved(x, weights_only=True)]
)
def test_a_prepacked_operand_can_be_copied_and_saved(again):
    b = gemmtune.prepack(torch.randn(48, 32))
    expected = gemmtune.mm(WIDE @ torch.ones(16, 48), b)
    copied = again(b)
    assert copied.tensor.data_ptr() != b.tensor.data_ptr()
    assert torch.equal(gemmtune.mm(WIDE @ torch.ones(16, 48), copied), expected)


def saved(value, *, weights_only=False):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def test_a_bad_call_leaves_out_as_it_was():
    out = torch.full((5, 4), 7.0)
    with pytest.raises(InvalidProblemError):
        gemmtune.mm(A, B, out=out)
    assert (out == 7).all()


def test_interleaved_views_of_one_buffer_do_not_count_as_overlap():
    buffer = torch.zeros(4, 8)
    a, out = buffer[:, :3].copy_(A), buffer[:, 3:]
    gemmtune.mm(a, B, out=out)
    assert torch.equal(out, A @ B)
    assert torch.equal(buffer[:, :3], A)
