"""Problem, dtypes and precision: validation messages, derived values, keys."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Epilogue, Layout, Precision, Problem, precision_of
from gemmtune.problem.dtypes import DTYPES, accumulator_dtype, dtype_info, dtype_name, parse_dtype
from gemmtune.problem.operations import OPERATIONS
from gemmtune.problem.problem import scalar_class
from gemmtune.problem.trace import trace

F32 = torch.float32


def row(*size: int, dtype: torch.dtype = F32) -> Layout:
    return Layout.contiguous(size, dtype)


def problem(
    a: Layout, b: Layout, out: Layout, op: str = "mm", inp: Layout | None = None, epilogue: Epilogue | None = None
) -> Problem:
    return Problem(op=op, a=a, b=b, out=out, inp=inp, epilogue=epilogue)  # type: ignore[arg-type]


BAD: dict[str, tuple[Callable[[], Problem], str]] = {
    "op": (
        lambda: problem(row(4, 5), row(5, 6), row(4, 6), "matmul"),
        f"op: got 'matmul', expected one of {', '.join(OPERATIONS)}",
    ),
    "1-D a": (lambda: problem(row(5), row(5, 6), row(4, 6)), "mm: a must be a 2-D tensor, got shape [5]"),
    "3-D b": (lambda: problem(row(4, 5), row(1, 5, 6), row(4, 6)), "mm: b must be a 2-D tensor, got shape [1, 5, 6]"),
    "2-D bmm": (lambda: problem(row(4, 5), row(5, 6), row(4, 6), "bmm"), "bmm: a must be a 3-D tensor, got shape [4, 5]"),
    "dtypes": (
        lambda: problem(row(4, 5), row(5, 6, dtype=torch.float16), row(4, 6)),
        "mm: a and b must have the same dtype, got torch.float32 and torch.float16; cast one of them",
    ),
    "unsupported dtype": (
        lambda: problem(row(4, 5, dtype=torch.int32), row(5, 6, dtype=torch.int32), row(4, 6, dtype=torch.int32)),
        "mm: dtype of a: got torch.int32, expected one of float64, float32, float16, bfloat16",
    ),
    "inner size": (
        lambda: problem(row(4, 5), row(7, 6), row(4, 6)),
        "mm: shapes do not fit, got a [4, 5] and b [7, 6]; expected a [M, K] and b [K, N]",
    ),
    "batch": (
        lambda: problem(row(2, 4, 5), row(3, 5, 6), row(2, 4, 6), "bmm"),
        "bmm: shapes do not fit, got a [2, 4, 5] and b [3, 5, 6]; expected a [B, M, K] and b [B, K, N]",
    ),
    "out": (lambda: problem(row(4, 5), row(5, 6), row(6, 4)), "mm: out must have shape [4, 6], got [6, 4]"),
    "no inp": (
        lambda: problem(row(4, 5), row(5, 6), row(4, 6), "addmm"),
        "addmm: inp is missing, expected inp that broadcasts to out",
    ),
    "inp of mm": (
        lambda: problem(row(4, 5), row(5, 6), row(4, 6), "mm", row(6)),
        "mm: takes no inp, got shape [6]; addmm, baddbmm and bsr_addmm do",
    ),
    "inp dtype": (
        lambda: problem(row(4, 5), row(5, 6), row(4, 6), "addmm", row(6, dtype=torch.float16)),
        "addmm: a and inp must have the same dtype, got torch.float32 and torch.float16; cast one of them",
    ),
    "inp shape": (
        lambda: problem(row(4, 5), row(5, 6), row(4, 6), "addmm", row(4)),
        "addmm: inp: got an operand of shape (4,), expected one that broadcasts to (4, 6)",
    ),
    "epilogue operand": (
        lambda: problem(row(4, 5), row(5, 6), row(4, 6), epilogue=trace(lambda acc, s: acc * s, F32, [torch.ones(5)])),
        "mm: epilogue_args[0]: got an operand of shape (5,), expected one that broadcasts to (4, 6)",
    ),
    "layout": (lambda: Problem.mm(4, 5, 6, layout="nx"), "layout: got 'nx', expected one of nn, nt, tn, tt"),
    "bias": (
        lambda: Problem.addmm(4, 5, 6, bias="k"),  # type: ignore[arg-type]
        "bias: got 'k', expected one of n, mn, m1, 1n, scalar",
    ),
    "negative": (lambda: Problem.mm(-4, 5, 6), "m: got -4, expected an integer from 0 to 2147483647"),
    "float size": (lambda: Problem.mm(1.5, 8, 8), "m: got 1.5, expected an integer from 0 to 2147483647"),  # type: ignore[arg-type]
    "text size": (lambda: Problem.mm(8, "8", 8), "n: got '8', expected an integer from 0 to 2147483647"),  # type: ignore[arg-type]
    "huge size": (lambda: Problem.mm(8, 8, 2**40), "k: got 1099511627776, expected an integer from 0 to 2147483647"),
    "huge batch": (lambda: Problem.bmm(2**31, 8, 8, 8), "batch: got 2147483648, expected an integer from 0 to 2147483647"),
    "float k2": (
        lambda: Problem.mm_plus_mm(8, 8, 8, 2.0, device_type="cpu"),  # type: ignore[arg-type]
        "k2: got 2.0, expected an integer from 0 to 2147483647",
    ),
    "huge operand": (
        lambda: Problem.mm(2**30, 8, 2**30),
        "sizes: got an operand of (1073741824, 1073741824), expected at most 2^46 elements; take smaller sizes",
    ),
    "device type": (lambda: Problem.mm(8, 8, 8, device_type="tpu"), "device_type: got 'tpu', expected one of cpu, cuda"),
}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("size", [-1, "4", True, 1.5])
def test_every_constructor_names_an_illegal_size(op: str, size: Any) -> None:
    make, sizes = getattr(Problem, op), inspect.signature(getattr(Problem, op)).parameters
    names = [name for name in ("batch", "m", "n", "k") if name in sizes]
    for name in (*names, *(["groups"] if "groups" in sizes else [])):
        given = {"device_type": "cpu", **dict.fromkeys(names, 8), name: size}
        with pytest.raises(InvalidProblemError, match=f"^{name}: got {size!r}, expected an integer from 0 to 2147483647$"):
            make(**given)


def test_every_constructor_has_the_same_default_numbers() -> None:
    defaults = {"alpha": 1, "beta": 1, "groups": 8}
    for op in OPERATIONS:
        numbers = {name: x.default for name, x in inspect.signature(getattr(Problem, op)).parameters.items() if name in defaults}
        assert numbers == {name: defaults[name] for name in numbers}, op


@pytest.mark.parametrize("name", BAD)
def test_rejects_invalid_problems(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InvalidProblemError) as caught:
        make()
    assert str(caught.value) == message
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constructors(layout: str, dtype: torch.dtype) -> None:
    mm = Problem.mm(4, 5, 6, dtype=dtype, layout=layout, device_type="cpu")
    assert (mm.m, mm.n, mm.k, mm.batch, mm.batched) == (4, 5, 6, 1, False)
    assert (mm.a.row_major, mm.b.row_major) == (layout[0] == "n", layout[1] == "n")
    assert (mm.dtype, mm.out.dtype, mm.layout_letters) == (dtype, dtype, layout)
    bmm = Problem.bmm(3, 4, 5, 6, dtype=dtype, layout=layout, device_type="cpu")
    assert (bmm.m, bmm.n, bmm.k, bmm.batch, bmm.batched, bmm.layout_letters) == (4, 5, 6, 3, True, layout)
    assert bmm.a.size == (3, 4, 6)
    assert bmm.b.size == (3, 6, 5)


@pytest.mark.parametrize(("bias", "shape"), [("n", (5,)), ("mn", (4, 5)), ("m1", (4, 1)), ("1n", (1, 5)), ("scalar", ())])
def test_biases(bias: str, shape: tuple[int, ...]) -> None:
    made = Problem.addmm(4, 5, 6, bias=bias, alpha=2, beta=1, device_type="cpu")  # type: ignore[arg-type]
    assert made.inp is not None
    assert made.inp.size == shape
    assert (made.alpha, made.beta) == ("general", "one")
    batched = Problem.baddbmm(3, 4, 5, 6, device_type="cpu")
    assert batched.inp is not None
    assert batched.inp.size == (3, 4, 5)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "zero"), (-0.0, "zero"), (1, "one"), (True, "one"), (2, "general"), (1e-300, "general")]
)
def test_scalar_class(value: float, expected: str) -> None:
    assert scalar_class(value) == expected


def test_derived_values() -> None:
    made = Problem.addmm(4, 5, 6, dtype=torch.float16, device_type="cpu")
    assert made.flops == 2 * 4 * 5 * 6
    assert made.bytes == 2 * (4 * 6 + 6 * 5 + 4 * 5 + 5)
    assert Problem.addmm(4, 5, 6, dtype=torch.float16, beta=0, device_type="cpu").bytes == 2 * (4 * 6 + 6 * 5 + 4 * 5)
    assert made.accumulator == F32
    assert Problem.mm(4, 5, 6, dtype=torch.float64).accumulator == torch.float64
    assert not made.empty
    assert Problem.mm(0, 5, 6).empty
    assert Problem.mm(4, 5, 0).empty is False
    assert Problem.bmm(0, 4, 5, 6).empty


def test_broadcast_operands_count_their_own_bytes() -> None:
    b = Layout(size=(8, 6, 5), stride=(0, 5, 1), dtype=F32)
    made = problem(row(8, 4, 6), b, row(8, 4, 5), "bmm")
    assert made.bytes == 4 * (8 * 4 * 6 + 6 * 5 + 8 * 4 * 5)


def test_keys_are_equal_exactly_for_equal_problems() -> None:
    base = Problem.addmm(4, 5, 6, dtype=F32, device_type="cpu")
    epilogues = [trace(f, F32, []) for f in (lambda acc: acc * 2, lambda acc: acc * 3, lambda acc: acc * 2.0)]
    variants = [
        base,
        dataclasses.replace(base, a=dataclasses.replace(base.a, offset=1)),
        dataclasses.replace(base, out=Layout(size=(4, 5), stride=(8, 1), dtype=F32)),
        dataclasses.replace(base, alpha="general"),
        dataclasses.replace(base, beta="zero"),
        dataclasses.replace(base, inp=row(1, 5)),
        dataclasses.replace(base, device_type="cuda"),
        dataclasses.replace(base, precision=Precision(input_mode="tf32")),
        dataclasses.replace(base, precision=Precision(reduced_partials=True)),
        dataclasses.replace(base, prepacked=True),
        Problem.addmm(4, 5, 6, dtype=F32, layout="nn", device_type="cpu"),
        Problem.addmm(4, 5, 6, dtype=torch.float16, device_type="cpu"),
        Problem.mm(4, 5, 6, dtype=F32, device_type="cpu"),
        *(dataclasses.replace(base, epilogue=e) for e in epilogues[:2]),
    ]
    assert len({v.key for v in variants}) == len(set(variants)) == len(variants)
    again = Problem.addmm(4, 5, 6, dtype=F32, device_type="cpu")
    assert (again, again.key, hash(again)) == (base, base.key, hash(base))


def test_pickles_and_has_a_json_key_with_readable_sizes() -> None:
    epilogue = trace(lambda acc, s: torch.relu(acc.clamp(min=0) * s).half(), F32, [torch.ones(5)])
    made = dataclasses.replace(Problem.mm(4, 5, 6, dtype=F32, device_type="cpu"), epilogue=epilogue)
    assert pickle.loads(pickle.dumps(made)) == made
    data = json.loads(made.key)
    assert (data["m"], data["n"], data["k"], data["batch"], data["op"]) == (4, 5, 6, 1, "mm")
    assert data["a"]["dtype"] == "float32"
    assert data["epilogue"]["nodes"][-1] == {"op": "cast", "args": ["%4"], "dtype": "float16"}


def test_text() -> None:
    cpu = {"device_type": "cpu"}
    assert str(Problem.mm(4, 5, 6, **cpu)) == "mm 4x5x6 bfloat16 nt on cpu"
    assert str(Problem.bmm(3, 4, 5, 6, dtype=F32, layout="tn", **cpu)) == "bmm 3x4x5x6 float32 tn on cpu"
    assert str(Problem.addmm(4, 5, 6, dtype=F32, alpha=2, **cpu)) == "addmm 4x5x6 float32 nt inp[5] alpha=general beta=one on cpu"
    tf32 = Problem.mm(4, 5, 6, dtype=F32, device_type="cuda", precision=Precision(input_mode="tf32"), prepacked=True)
    assert str(tf32) == "mm 4x5x6 tf32 nt prepacked on cuda"
    relu = dataclasses.replace(Problem.mm(4, 5, 6, **cpu), epilogue=trace(torch.relu, F32, []))
    assert str(relu) == "mm 4x5x6 bfloat16 nt epilogue=relu(acc) on cpu"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_facts_match_torch(dtype: torch.dtype) -> None:
    info, finfo = dtype_info(dtype), torch.finfo(dtype)
    assert info.unit_roundoff == finfo.eps / 2
    assert info.smallest_normal == finfo.smallest_normal
    assert info.smallest_subnormal == finfo.smallest_normal * finfo.eps
    assert info.itemsize == dtype.itemsize
    assert (info.name, dtype_name(dtype)) == (str(dtype).removeprefix("torch."),) * 2
    largest = torch.tensor(info.exact_integer, dtype=torch.float64)
    assert largest.to(dtype).double() == largest
    if dtype != torch.float64:
        assert (largest + 1).to(dtype).double() != largest + 1
        assert accumulator_dtype(dtype) == F32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("FP16", torch.float16),
        ("half", torch.float16),
        ("float", F32),
        ("double", torch.float64),
        ("f32", F32),
        ("torch.bfloat16", torch.bfloat16),
        ("e4m3", torch.float8_e4m3fn),
    ],
)
def test_parse_dtype(name: str, dtype: torch.dtype) -> None:
    assert parse_dtype(name) == dtype


def test_constructors_take_every_name_of_a_dtype() -> None:
    for dtype, info in DTYPES.items():
        for name in (info.name, info.short, str(dtype), info.short.upper()):
            assert Problem.mm(2, 3, 4, dtype=name, device_type="cpu") == Problem.mm(2, 3, 4, dtype=dtype, device_type="cpu")
    by_name = {"dtype": "fp16", "dtype_b": "e4m3", "scale_dtype": "f16", "scales": "column", "device_type": "cpu"}
    plain = {"dtype": torch.float16, "dtype_b": torch.float8_e4m3fn, "scale_dtype": torch.float16}
    assert Problem.mixed_mm(2, 3, 4, **by_name) == Problem.mixed_mm(2, 3, 4, **(by_name | plain))
    with pytest.raises(InvalidProblemError, match=r"dtype: got .tf32., expected one of .*; for float32 in tf32 precision give"):
        Problem.mm(2, 3, 4, dtype="tf32")


def test_parse_dtype_lists_known_names() -> None:
    with pytest.raises(InvalidProblemError) as caught:
        parse_dtype("int3")
    assert str(caught.value) == (
        "dtype: got 'int3', expected one of float64, float32, float16, bfloat16, int8, uint8, int32, float8_e4m3fn, float8_e5m2, "
        "float8_e4m3fnuz, float8_e5m2fnuz"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_precision_is_strictest_on_a_cpu(dtype: torch.dtype) -> None:
    assert precision_of(dtype, "cpu") == Precision(input_mode="ieee", reduced_partials=False)


def test_precision_follows_torchs_flags() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_fp16_reduced_precision_reduction
    try:
        for mode, expected in (("tf32", "tf32"), ("ieee", "ieee")):
            matmul.fp32_precision = mode
            assert precision_of(F32, "cuda").input_mode == expected
            assert precision_of(torch.float64, "cuda") == Precision()
        for reduced in (True, False):
            matmul.allow_fp16_reduced_precision_reduction = reduced
            assert precision_of(torch.float16, "cuda").reduced_partials is reduced
    finally:
        matmul.fp32_precision, matmul.allow_fp16_reduced_precision_reduction = before


def test_b_has_its_own_dtypes_or_those_of_a() -> None:
    assert OPERATIONS["mm"].dtypes_of_b == OPERATIONS["mm"].operands[0].dtypes != ()
    assert (
        OPERATIONS["mixed_mm"].dtypes_of_b == OPERATIONS["mixed_mm"].operands[1].dtypes != OPERATIONS["mixed_mm"].operands[0].dtypes
    )
