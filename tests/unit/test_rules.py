"""int_mm, mixed_mm and scaled_mm as problems: rules, keys, texts, and refusals by backends."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune.backends import table as backends
from gemmtune.backends.cublaslt.gemm import gemm_of
from gemmtune.device import preset
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Layout, Problem
from gemmtune.problem.dtypes import accumulator_dtype, dtype_info
from gemmtune.problem.gradients import gradients, grouped_op, of_sum, of_two_products, of_widened, read_by
from gemmtune.problem.operations import DENSE_OPS, OPERATIONS, QUANTIZED_OPS
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings

F32, BF16, INT8, INT32 = torch.float32, torch.bfloat16, torch.int8, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INT = Problem.int_mm(4, 5, 6, device_type="cpu")
SCALED = Problem.scaled_mm(4, 5, 6, scales="row", device_type="cpu")
FLOAT = Problem.mm(4, 5, 6, dtype=F32, device_type="cpu")


def retyped(layout: Layout, dtype: torch.dtype) -> Layout:
    return dataclasses.replace(layout, dtype=dtype)


def changed(problem: Problem, **fields: Any) -> Callable[[], Problem]:
    return lambda: dataclasses.replace(problem, **fields)


def scale(*size: int, dtype: torch.dtype = F32) -> Layout:
    return Layout.contiguous(size, dtype)


SCALAR, RELU = scale(), trace(torch.relu, F32, [])
EXPERTS = Problem.scaled_grouped_mm(4, 5, 256, groups=3, device_type="cpu")
MIXED = Problem.mixed_mm(4, 5, 64, scales="group_32", zeros=True, device_type="cpu")
PACKED = Problem.mixed_mm(4, 5, 64, encoding="int4", scales="column", device_type="cpu")
BAD: dict[str, tuple[Callable[[], Problem], str]] = {
    **{
        f"{count} groups": (
            lambda count=count: Problem.grouped_mm(4, 5, 8, groups=count, device_type="cpu"),
            f"grouped_mm: got offs of {count} groups, expected 1 to 1024",
        )
        for count in (0, 1025)
    },
    "int_mm of floats": (changed(FLOAT, op="int_mm"), "int_mm: dtype of a: got torch.float32, expected int8"),
    "int_mm of uint8": (changed(INT, b=retyped(INT.b, torch.uint8)), "int_mm: dtype of b: got torch.uint8, expected int8"),
    "int_mm into int8": (changed(INT, out=retyped(INT.out, INT8)), "int_mm: dtype of out: got torch.int8, expected int32"),
    "int_mm with inp": (changed(INT, inp=INT.out), "int_mm: takes no inp, got shape [4, 5]; addmm, baddbmm and bsr_addmm do"),
    "batched int_mm": (
        changed(INT, a=Layout.contiguous((2, 4, 6), INT8)),
        "int_mm: a must be a 2-D tensor, got shape [2, 4, 6]",
    ),
    "int_mm shapes": (
        changed(INT, b=Layout.contiguous((7, 5), INT8)),
        "int_mm: shapes do not fit, got a [4, 6] and b [7, 5]; expected a [M, K] and b [K, N]",
    ),
    "int_mm with scales": (
        changed(INT, scale_a=SCALAR),
        "int_mm: takes no scale_a, got shape []; scaled_mm and scaled_grouped_mm do",
    ),
    "scaled_mm with zero points": (
        changed(SCALED, zero_b=scale(1, 5)),
        "scaled_mm: takes no zero_b, got shape [1, 5]; mixed_mm does",
    ),
    "mixed_mm with a scale of a": (
        changed(MIXED, scale_a=scale(4, 1)),
        "mixed_mm: takes no scale_a, got shape [4, 1]; scaled_mm and scaled_grouped_mm do",
    ),
    "mm with scales": (
        changed(FLOAT, scale_b=scale(1, 5)),
        "mm: takes no scale_b, got shape [1, 5]; mixed_mm, scaled_mm, mixed_grouped_mm and scaled_grouped_mm do",
    ),
    "mm with fast_accum": (
        changed(FLOAT, fast_accum=True),
        "mm: takes no fast_accum, got True; scaled_mm and scaled_grouped_mm do",
    ),
    "mixed_mm with fast_accum": (
        changed(MIXED, fast_accum=True),
        "mixed_mm: takes no fast_accum, got True; scaled_mm and scaled_grouped_mm do",
    ),
    "int_mm with alpha": (
        changed(INT, alpha="general"),
        "int_mm: takes no alpha or beta, got alpha general and beta zero; give an epilogue that multiplies or adds",
    ),
    "int_mm into int32 with an epilogue": (
        changed(INT, epilogue=RELU),
        "int_mm: dtype of out: got torch.int32, expected one of float32, float16, bfloat16",
    ),
    "int_mm into float32 without an epilogue": (
        changed(INT, out=retyped(INT.out, F32)),
        "int_mm: dtype of out: got torch.float32, expected int32",
    ),
    "scaled_mm of bfloat16": (
        changed(SCALED, a=retyped(SCALED.a, BF16)),
        "scaled_mm: dtype of a: got torch.bfloat16, expected one of float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz",
    ),
    "scaled_mm into float64": (
        changed(SCALED, out=retyped(SCALED.out, torch.float64)),
        "scaled_mm: dtype of out: got torch.float64, expected one of float32, float16, bfloat16",
    ),
    "no scale": (changed(SCALED, scale_b=None), "scaled_mm: scale_b is missing, expected a scale of float32"),
    "scale dtype": (
        changed(SCALED, scale_a=scale(4, 1, dtype=BF16)),
        "scaled_mm: dtype of scale_a: got torch.bfloat16, expected float32",
    ),
    "scale shape": (
        changed(SCALED, scale_a=scale(4)),
        "scaled_mm: scale_a must have one element or shape [4, 1] or [1, 1], got [4]",
    ),
    "scale of the other": (
        changed(SCALED, scale_b=scale(5, 1)),
        "scaled_mm: scale_b must have one element or shape [1, 5] or [1, 1], got [5, 1]",
    ),
    "scale of other blocks": (
        lambda: dataclasses.replace(Problem.scaled_mm(4, 300, 260, scales="block_1x128"), scale_b=scale(2, 300)),
        "scaled_mm: scale_b must have one element or shape [1, 300] or [3, 300] or [3, 3], got [2, 300]",
    ),
    "ends of groups with gaps": (
        changed(Problem.grouped_mm(4, 5, 6, groups=2, device_type="cpu"), offs=Layout(size=(2,), stride=(2,), dtype=INT32)),
        "grouped_mm: got offs int32[2](2), expected contiguous ones; give offs.contiguous()",
    ),
    "scales of experts that are for something else": (
        changed(EXPERTS, scale_b=scale(3, 1, 7)),
        "scaled_grouped_mm: got scale_a [4, 1] and scale_b [3, 1, 7], expected [4, 1] and [3, 1, 5] or [4, 2] and [3, 2, 1] "
        "or [4, 2] and [3, 2, 5]: one number for each row and column, or for each 128 elements along K of it, or "
        "for each 128x128 of b",
    ),
    "mixed_mm of int32": (
        changed(MIXED, b=retyped(MIXED.b, INT32)),
        "mixed_mm: dtype of b: got torch.int32, expected one of int8, uint8, float8_e4m3fn, float8_e5m2",
    ),
    "mixed_mm of float64": (
        changed(MIXED, a=retyped(MIXED.a, torch.float64)),
        "mixed_mm: dtype of a: got torch.float64, expected one of float32, float16, bfloat16",
    ),
    "mixed_mm with two float dtypes": (
        changed(MIXED, b=retyped(MIXED.b, BF16)),
        "mixed_mm: dtype of b: got torch.bfloat16, expected one of int8, uint8, float8_e4m3fn, float8_e5m2",
    ),
    "packed int8": (
        changed(PACKED, b=retyped(PACKED.b, INT8)),
        "mixed_mm: dtype of b with encoding int4: got torch.int8, expected uint8",
    ),
    "packed shapes": (
        changed(PACKED, b=Layout.contiguous((64, 5), torch.uint8)),
        "mixed_mm: shapes do not fit, got a [4, 64] and b [128, 5] (two rows in each byte); expected a [M, K] and b [K, N]",
    ),
    "packed, and not said to be": (
        changed(PACKED, encoding=""),
        "mixed_mm: shapes do not fit, got a [4, 64] and b [32, 5]; expected a [M, K] and b [K, N]; "
        "if b has two numbers in each byte, give encoding 'int4' or 'uint4'",
    ),
    "half of the rows, and nothing packed": (
        changed(MIXED, b=Layout.contiguous((32, 5), INT8)),
        "mixed_mm: shapes do not fit, got a [4, 64] and b [32, 5]; expected a [M, K] and b [K, N]",
    ),
    "encoding": (
        changed(PACKED, encoding="nf4"),
        "mixed_mm: encoding: got 'nf4', expected one of '', 'int4', 'uint4'",
    ),
    "packed int_mm": (changed(INT, encoding="int4"), "int_mm: takes no encoding, got 'int4'; mixed_mm and mixed_grouped_mm do"),
    "zero points without scales": (
        changed(MIXED, scale_b=None),
        "mixed_mm: got zero_b without scale_b, expected both: b is read as (b - zero_b) * scale_b",
    ),
    "scale of weights in another dtype": (
        changed(MIXED, scale_b=scale(2, 5, dtype=BF16)),
        "mixed_mm: dtype of scale_b: got torch.bfloat16, expected one of float32, float16",
    ),
    "group of weights": (
        changed(MIXED, zero_b=scale(4, 5)),
        "mixed_mm: zero_b must have one element or shape [1, 5] or [2, 5], got [4, 5]",
    ),
    "batched mixed_mm": (
        changed(MIXED, b=Layout.contiguous((1, 64, 5), INT8)),
        "mixed_mm: b must be a 2-D tensor, got shape [1, 64, 5]",
    ),
    "kind of scales of weights": (
        lambda: Problem.mixed_mm(4, 5, 6, scales="group_16"),  # type: ignore[arg-type]
        "scales: got 'group_16', expected one of none, tensor, column, group_32, group_64, group_128",
    ),
    "kind of scales": (
        lambda: Problem.scaled_mm(4, 5, 6, scales="block"),  # type: ignore[arg-type]
        "scales: got 'block', expected one of tensor, row, block_1x128, block_128x128",
    ),
    "mm of int8": (
        lambda: Problem.mm(4, 5, 6, dtype=INT8),
        "mm: dtype of a: got torch.int8, expected one of float64, float32, float16, bfloat16",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_rejects_invalid_problems(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InvalidProblemError) as caught:
        make()
    assert str(caught.value) == message


def test_constructors() -> None:
    assert (INT.a.dtype, INT.b.dtype, INT.out.dtype, INT.accumulator) == (INT8, INT8, INT32, INT32)
    assert (INT.layout_letters, Problem.int_mm(4, 5, 6, layout="tn").layout_letters) == ("nt", "tn")
    mixed = Problem.scaled_mm(4, 5, 6, dtype=E5M2, dtype_b=E4M3, out_dtype=torch.float16, fast_accum=True)
    assert (mixed.a.dtype, mixed.b.dtype, mixed.out.dtype, mixed.accumulator) == (E5M2, E4M3, torch.float16, F32)
    assert (mixed.scale_a, mixed.scale_b, mixed.fast_accum) == (SCALAR, SCALAR, True)
    assert (SCALED.scale_a, SCALED.scale_b) == (scale(4, 1), scale(1, 5))
    assert SCALED.bytes == 4 * 6 + 6 * 5 + 2 * 4 * 5 + 4 * (4 + 5)
    for one in (SCALAR, scale(1), scale(1, 1)):
        assert dataclasses.replace(SCALED, scale_a=one).scale_a == one


def test_constructors_of_mixed_mm() -> None:
    assert (MIXED.a.dtype, MIXED.b.dtype, MIXED.out.dtype, MIXED.accumulator) == (torch.float16, INT8, torch.float16, F32)
    assert (MIXED.b.size, MIXED.b_size, MIXED.k) == ((64, 5), (64, 5), 64)
    assert (PACKED.b.size, PACKED.b_size, PACKED.b.dtype, PACKED.k) == ((32, 5), (64, 5), torch.uint8, 64)
    assert MIXED.scale_b == MIXED.zero_b == scale(2, 5, dtype=torch.float16)
    assert MIXED.scales == (MIXED.scale_b, MIXED.zero_b)
    assert PACKED.bytes == 2 * 4 * 64 + 32 * 5 + 2 * 4 * 5 + 2 * 5
    assert Problem.mixed_mm(4, 5, 6, dtype=BF16, dtype_b=E4M3).scales == ()
    assert Problem.mixed_mm(4, 5, 64, scales="tensor", scale_dtype=F32).scale_b == SCALAR
    odd = r"\(two rows in each byte\); expected a \[M, K\] and b \[K, N\], and an even K; append a column of zeros to a"
    with pytest.raises(InvalidProblemError, match=odd):
        Problem.mixed_mm(4, 5, 7, encoding="uint4")
    with pytest.raises(InvalidProblemError, match=r"zeros: got no scales, expected one of tensor, column, group_32"):
        Problem.mixed_mm(4, 5, 6, zeros=True)


def test_blocks_of_scales() -> None:
    assert (MIXED.scale_block("scale_b"), MIXED.scale_block("zero_b")) == ((32, 1), (32, 1))
    assert PACKED.scale_block("scale_b") == (64, 1)
    blocks = {"tensor": ((130, 300), (300, 140)), "row": ((1, 300), (300, 1)),
              "block_1x128": ((1, 128), (128, 1)), "block_128x128": ((1, 128), (128, 128))}  # fmt: skip
    for scales, expected in blocks.items():
        problem = Problem.scaled_mm(130, 140, 300, scales=scales)  # type: ignore[arg-type]
        assert (problem.scale_block("scale_a"), problem.scale_block("scale_b")) == expected


def test_blocks_of_scales_of_groups() -> None:
    for scales, expected in (("group_32", (32, 1)), ("column", (96, 1))):
        problem = Problem.mixed_grouped_mm(8, 5, 96, groups=2, scales=scales, device_type="cpu")  # type: ignore[arg-type]
        assert problem.scale_block("scale_b") == expected
    assert (EXPERTS.scale_block("scale_a"), EXPERTS.scale_block("scale_b")) == ((1, 256), (256, 1))


def test_given_drops_omitted_operands() -> None:
    row = OPERATIONS["routed_grouped_mm"]
    assert [x.role for x in row.given(()).operands] == ["a", "b", "offs"]
    assert [(x.role, x.shape) for x in row.given(("rows",)).operands][::3] == [("a", ("T", "K")), ("rows", ("M",))]
    assert [x.role for x in OPERATIONS["addmm"].given((), gated="silu").operands] == ["a", "b", "inp"], "what has no shape stays"


@pytest.mark.parametrize(("dtype", "expected"), [(F32, F32), (BF16, BF16), (E4M3, BF16), (INT8, INT32)])
def test_result_dtypes_of_sparse_weights_follow_a(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert OPERATIONS["bsr_mm"].result_dtype(dtype, epilogue=False) == expected


def test_an_epilogue_of_int_mm_receives_float32() -> None:
    problem = dataclasses.replace(INT, epilogue=RELU, out=retyped(INT.out, F32))
    assert (problem.accumulator, problem.epilogue_dtype) == (INT32, F32)
    assert dataclasses.replace(SCALED, epilogue=RELU).epilogue_dtype == F32
    assert Problem.mm(4, 5, 6, dtype=torch.float64).epilogue_dtype == torch.float64


def test_text() -> None:
    assert str(INT) == "int_mm 4x5x6 int8 nt on cpu"
    assert str(SCALED) == "scaled_mm 4x5x6 float8_e4m3fn nt out bfloat16 scale_a[1x-] scale_b[-x1] on cpu"
    mixed = Problem.scaled_mm(4, 5, 6, dtype=E5M2, dtype_b=E4M3, fast_accum=True, device_type="cuda")
    assert str(mixed) == ("scaled_mm 4x5x6 float8_e5m2 nt b float8_e4m3fn out bfloat16 scale_a[1] scale_b[1] fast_accum on cuda")
    assert "scale_a[1] scale_b[-x1] on" in str(dataclasses.replace(SCALED, scale_a=SCALAR))
    assert str(MIXED) == "mixed_mm 4x5x64 float16 nt b int8 scale_b[32x1] zero_b[32x1] on cpu"
    assert str(PACKED) == "mixed_mm 4x5x64 float16 nt b int4 scale_b[-x1] on cpu"
    assert str(dataclasses.replace(PACKED, epilogue=RELU)).endswith("scale_b[-x1] epilogue=relu(acc) on cpu")


def test_keys_distinguish_scales_encodings_and_fast_accum() -> None:
    variants = [
        INT, SCALED, changed(SCALED, scale_a=SCALAR)(), changed(SCALED, fast_accum=True)(),
        changed(SCALED, out=retyped(SCALED.out, F32))(), changed(SCALED, b=retyped(SCALED.b, E5M2))(),
        changed(SCALED, scale_a=Layout(size=(4, 1), stride=(2, 1), dtype=F32))(),
        changed(SCALED, epilogue=RELU)(), changed(INT, epilogue=RELU, out=retyped(INT.out, F32))(),
        MIXED, PACKED, changed(PACKED, encoding="uint4")(), changed(MIXED, zero_b=None)(),
        changed(MIXED, scale_b=scale(1, 5))(), changed(MIXED, scale_b=scale(2, 5))(), changed(MIXED, zero_b=SCALAR)(),
        changed(MIXED, scale_b=None, zero_b=None)(),
    ]  # fmt: skip
    assert len({v.key for v in variants}) == len(set(variants)) == len(variants)
    for problem in variants:
        assert pickle.loads(pickle.dumps(problem)) == problem


def test_keys_of_dense_operations_gain_no_fields() -> None:
    golden = json.loads((Path(__file__).parent / "golden_keys.json").read_text())
    made = {
        "mm": Problem.mm(4, 5, 6, device_type="cpu"),
        "addmm": Problem.addmm(4, 5, 6, dtype=F32, bias="m1", alpha=2, beta=0.5, layout="tn", device_type="cpu"),
        "bmm": Problem.bmm(2, 4, 5, 6, dtype=torch.float16, layout="nn", device_type="cpu"),
        "baddbmm": Problem.baddbmm(2, 4, 5, 6, dtype=torch.float64, device_type="cpu"),
    }
    assert set(golden) == set(made) == set(DENSE_OPS)
    for op, problem in made.items():
        assert problem.key == json.dumps(golden[op], sort_keys=True, separators=(",", ":"))
    assert not {"scale_a", "scale_b", "zero_b", "encoding", "fast_accum"} & set(INT.to_json())
    assert {"scale_b", "zero_b", "encoding"} <= set(MIXED.to_json())
    assert not {"scale_a", "fast_accum", "c", "d", "k2"} & set(MIXED.to_json())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_float8_facts_match_torch(dtype: torch.dtype) -> None:
    info, finfo = dtype_info(dtype), torch.finfo(dtype)
    assert (info.unit_roundoff, info.largest) == (finfo.eps / 2, finfo.max)
    assert (info.smallest_normal, info.smallest_subnormal) == (finfo.smallest_normal, finfo.smallest_normal * finfo.eps)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    assert values.isinf().any() == info.has_infinity
    assert values[values > 0].min() == info.smallest_subnormal
    integers = torch.arange(info.exact_integer + 2, dtype=torch.float64)
    assert (integers.to(dtype).double() == integers).tolist() == [True] * (info.exact_integer + 1) + [False]


@pytest.mark.parametrize("dtype", [INT8, torch.uint8, INT32], ids=str)
def test_facts_about_integers(dtype: torch.dtype) -> None:
    info = dtype_info(dtype)
    assert info.exact_integer == info.largest == torch.iinfo(dtype).max
    assert (info.unit_roundoff, info.smallest_normal, info.smallest_subnormal) == (0, 0, 0)
    assert (info.is_integer, info.has_nan, info.has_infinity) == (True, False, False)
    assert accumulator_dtype(INT8) == INT32


def test_dtype_info_lists_known_dtypes() -> None:
    with pytest.raises(InvalidProblemError) as caught:
        dtype_info(torch.int16)
    known = "float64, float32, float16, bfloat16, int8, uint8, int32, float8_e4m3fn, float8_e5m2, "
    known += "float8_e4m3fnuz, float8_e5m2fnuz"
    assert str(caught.value) == f"dtype: got torch.int16, expected one of {known}"


@pytest.mark.parametrize("name", [name for name in backends.BACKENDS if name != "cublaslt"])
@pytest.mark.parametrize("op", QUANTIZED_OPS)
def test_backends_offer_choices_or_reasons(name: str, op: str) -> None:
    make = getattr(Problem, op)
    for arch, device_type in (("sm90", "cuda"), ("avx512", "cpu")):
        problem = make(64, 64, 64, device_type=device_type)
        offers = backends.load(name).enumerate(problem, preset(arch), Settings())
        assert offers.choices or offers.refusals
        assert all(refusal.reason for refusal in offers.refusals)
        assert all(choice.problem == problem for choice in offers.choices)


def test_cublaslt_refuses_unsupported_problems() -> None:
    with pytest.raises(InvalidProblemError) as caught:
        gemm_of(MIXED)
    assert str(caught.value) == (
        "mixed_mm is not an operation of this backend, which has mm, addmm, bmm, baddbmm, int_mm, scaled_mm"
    )


def test_arguments_follow_the_order_of_torch() -> None:
    assert OPERATIONS["mm"].arguments == ("a", "b")
    assert OPERATIONS["addmm"].arguments == OPERATIONS["baddbmm"].arguments == ("inp", "a", "b")
    assert OPERATIONS["mm_plus_mm"].arguments == ("a", "b", "c", "d")
    assert [OPERATIONS["bsr_addmm"].argument(role) for role in ("inp", "a", "b")] == ["inp", "x", "bsr"], "names in errors"


def test_rejects_operands_beyond_any_memory() -> None:
    assert Problem.mm(2**23, 1, 2**23, device_type="cpu").a.numel == 2**46
    with pytest.raises(InvalidProblemError, match=r"got an operand of \(8388608, 8388609\), expected at most 2\^46"):
        Problem.mm(2**23, 1, 2**23 + 1, device_type="cpu")


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_gradients_of_the_factors_have_alpha(alpha: float) -> None:
    g, operands = torch.ones(2, 3), {"a": torch.ones(2, 4), "b": torch.ones(4, 3)}
    numbers = {"alpha": alpha, "beta": 2.0}
    assert torch.equal(of_sum["a"].of(g, operands, numbers, torch.mm), torch.full((2, 4), 3 * alpha))
    assert torch.equal(of_sum["b"].of(g, operands, numbers, torch.mm), torch.full((4, 3), 2 * alpha))
    assert torch.equal(of_sum["inp"].of(g, operands, numbers, torch.mm), torch.full((2, 3), 2.0))


def test_gradients_read_declared_operands_and_keep_shapes() -> None:
    assert read_by(of_sum, ("a", "inp")) == {"b"}
    assert read_by(of_two_products, ("a", "d", "unknown")) == {"b", "c"}
    assert read_by(of_widened, ("a",)) == {"b", "scale_b", "zero_b"}
    assert read_by(of_widened, ("scale_b",)) == {"a", "b", "scale_b", "zero_b"}
    g, operands = torch.ones(2, 3), {"a": torch.ones(2, 4), "b": torch.ones(4, 3)}
    shapes = {"a": torch.Size((2, 4)), "b": torch.Size((4, 3)), "inp": torch.Size((3,))}
    found = gradients(of_sum, g, operands, shapes, {"alpha": 1, "beta": 2.0}, ("inp", "b"), torch.mm)
    assert {role: x.tolist() for role, x in found.items()} == {"inp": [4.0] * 3, "b": [[2.0] * 3] * 4}
    assert [grouped_op(torch.ones(size)) for size in ((2, 3, 4), (3, 4))] == ["grouped_mm", "grouped_k_mm"]
