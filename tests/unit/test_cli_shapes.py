"""Problems from words and files of the command line."""

from __future__ import annotations

import dataclasses
import json
import re

import click
import pytest
import torch

from gemmtune import Problem, Recording
from gemmtune.cli.shapes import parse_shape, problems_of_file
from gemmtune.cli.spec import Spec
from gemmtune.cli.words import OPS
from gemmtune.dispatch.statement import epilogue_of, problem_of
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Layout, Precision
from gemmtune.problem.trace import trace
from gemmtune.report.names import machine_text, problem_text
from gemmtune.tuning.named import bound_call

CPU = Spec(dtype="float32")
CUDA = Spec(dtype="float32", device_type="cuda")


@pytest.mark.parametrize(("text", "sizes"), [("16x4096x8", (16, 4096, 8)), ("2x3x4x5", (2, 3, 4, 5)), ("0x1x1", (0, 1, 1))])
def test_shapes(text, sizes):
    assert parse_shape(text) == sizes


@pytest.mark.parametrize("text", ["16x4096", "", "axbxc", "1x2x3x4x5", "16x4096x-1", "16 x 2 x 3", "1.5x2x3", "16X2X3", "1x2x3\n"])
def test_malformed_shapes(text):
    with pytest.raises(InvalidProblemError) as caught:
        parse_shape(text)
    assert str(caught.value) == (f"shape: got {text!r}, expected MxNxK or BxMxNxK with whole numbers, for instance 16x4096x4096")


@pytest.mark.parametrize(
    ("spec", "sizes", "expected"),
    [
        (CPU, (2, 3, 4), Problem.mm(2, 3, 4, dtype=torch.float32, device_type="cpu")),
        (CPU, (5, 2, 3, 4), Problem.bmm(5, 2, 3, 4, dtype=torch.float32, device_type="cpu")),
        (Spec(dtype="float16", layout="tn"), (2, 3, 4), Problem.mm(2, 3, 4, dtype=torch.float16, layout="tn", device_type="cpu")),
        (Spec(bias="n"), (2, 3, 4), Problem.addmm(2, 3, 4, device_type="cpu")),
        (Spec(op="addmm", bias="m1", alpha=2, beta=0), (2, 3, 4),
         Problem.addmm(2, 3, 4, bias="m1", alpha=2, beta=0, device_type="cpu")),
        (Spec(beta=0.5), (5, 2, 3, 4), Problem.baddbmm(5, 2, 3, 4, beta=0.5, device_type="cpu")),
        (Spec(prepacked=True), (2, 3, 4), Problem.mm(2, 3, 4, prepacked=True, device_type="cpu")),
        (Spec(dtype="tf32", device_type="cuda"), (2, 3, 4),
         Problem.mm(2, 3, 4, dtype=torch.float32, device_type="cuda", precision=Precision(input_mode="tf32"))),
    ],
    ids=["mm", "bmm", "dtype-layout", "bias-means-addmm", "addmm", "beta-means-baddbmm", "prepacked", "tf32"],
)  # fmt: skip
def test_options_make_the_problem(spec, sizes, expected):
    assert spec.problem(sizes, "shape") == expected


def test_precision_matches_a_call():
    # Otherwise a call after the tuning would be another problem than the one that was tuned.
    flag = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    problem = Spec(dtype="bfloat16", device_type="cuda").problem((2, 3, 4), "shape")
    assert problem.precision.reduced_partials == (flag[0] if isinstance(flag, tuple) else flag)


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (Spec(op="bmm"), (2, 3, 4), "here: got 3 sizes for bmm, expected BxMxNxK"),
        (Spec(op="mm"), (5, 2, 3, 4), "here: got 4 sizes for mm, expected MxNxK"),
        (Spec(op="mm", bias="n"), (2, 3, 4), "here: bias: not for mm, expected one of addmm, baddbmm, scaled_mm, bsr_addmm"),
        (Spec(prepacked=True), (5, 2, 3, 4),
         "here: prepacked: not for bmm, expected one of mm, addmm, int_mm, int_mm_mul, mixed_mm, scaled_mm, bsr_mm, bsr_addmm"),
        (Spec(dtype="tf32"), (2, 3, 4), "here: tf32 is a precision of GPUs; use --device cuda, or float32"),
    ],
    ids=["bmm-3", "mm-4", "mm-bias", "bmm-prepacked", "tf32-cpu"],
)  # fmt: skip
def test_options_that_do_not_fit(spec, sizes, message):
    with pytest.raises(InvalidProblemError, match=f"^{re.escape(message)}$"):
        spec.problem(sizes, "here")


def file_with(folder, data):
    path = folder / "shapes.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


ENTRY = {"name": "a", "op": "mm", "m": 2, "n": 3, "k": 4, "dtype": "float16", "layout": "nn"}


def test_a_file_of_shapes(tmp_path):
    path = file_with(
        tmp_path,
        {
            "about": "two",
            "shapes": [ENTRY, {"op": "bmm", "batch": 5, "m": 2, "n": 3, "k": 4}, {"m": 1, "n": 1, "k": 1, "bias": "n"}],
        },
    )
    assert problems_of_file(path, CPU) == (
        [
            Problem.mm(2, 3, 4, dtype=torch.float16, layout="nn", device_type="cpu"),
            Problem.bmm(5, 2, 3, 4, dtype=torch.float32, device_type="cpu"),
            Problem.addmm(1, 1, 1, dtype=torch.float32, device_type="cpu"),
        ],
        [],
    )


def test_a_bare_list_of_shapes(tmp_path):
    problems, _ = problems_of_file(file_with(tmp_path, [ENTRY]), CPU)
    assert len(problems) == 1


def test_operations_of_other_versions_are_skipped_with_a_line(tmp_path):
    later = {"name": "bsr", "op": "scatter_mm", "m": 1, "n": 8, "k": 8, "block": 32}
    path = file_with(tmp_path, [later, {**ENTRY, "dtype": "tf32"}, ENTRY])
    problems, skipped = problems_of_file(path, CPU)
    assert len(problems) == 1
    assert skipped == [
        f"skipped {path}: entry 1 (bsr): scatter_mm is not an operation of this version, which has {', '.join(OPS)}",
        f"skipped {path}: entry 2 (a): tf32 is a precision of GPUs; use --device cuda, or float32",
    ]
    assert len(problems_of_file(path, CUDA)[0]) == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**ENTRY, "m": "16"}, 'entry 2 (a): m: got "16", expected a whole number'),
        ({**ENTRY, "m": -1}, "entry 2 (a): m: got -1, expected a whole number"),
        ({**ENTRY, "m": True}, "entry 2 (a): m: got true, expected a whole number"),
        ({**ENTRY, "dtype": "int3"}, 'entry 2 (a): dtype: got "int3", expected one of float64, float32, float16, bfloat16, tf32, '
         'int8, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz'),
        ({**ENTRY, "layout": ["n"]}, 'entry 2 (a): layout: got ["n"], expected one of nn, nt, tn, tt'),
        ({**ENTRY, "op": "nn"}, f'entry 2 (a): op: got "nn", expected one of {", ".join(OPS)}'),
        ({**ENTRY, "op": "mixed_mm", "b_dtype": "int4"}, 'entry 2 (a): b_dtype: got "int4", expected one of int8, uint8, '
         'float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz; four bits are an encoding, int4 or uint4'),
        ({"n": 1, "k": 1}, "entry 2: m: missing, expected a whole number"),
        ({**ENTRY, "op": "bmm"}, "entry 2 (a): got 3 sizes for bmm, expected BxMxNxK"),
        ({**ENTRY, "layuot": "nt"},
         "entry 2 (a): layuot: unknown field, expected name, op, batch, m, n, k, dtype, layout, bias, alpha, beta, k2, "
         "prepacked, dtype_b, encoding, scales, zeros, scale_dtype, out_dtype, block, density, imbalance, groups, gated, "
         "tokens, fast_accum, b_dtype, pattern"),
        (7, "entry 2: got 7, expected an object with m, n and k"),
    ],
    ids=["text", "negative", "bool", "dtype", "layout", "op", "dtype_b", "missing", "bmm-without-batch", "unknown-field",
         "no-object"],
)  # fmt: skip
def test_malformed_entries_are_named(tmp_path, entry, message):
    path = file_with(tmp_path, [ENTRY, entry])
    with pytest.raises(InvalidProblemError, match=f"^{re.escape(f'{path}: {message}')}$"):
        problems_of_file(path, CPU)


@pytest.mark.parametrize(
    "data",
    ["{", {"shapes": {}}, {"shape": []}, [], 3, Recording().to_json()],
    ids=["no-json", "object", "no-shapes", "empty", "number", "recording"],
)
def test_malformed_files(tmp_path, data):
    path = file_with(tmp_path, data)
    wrong = r"(is not JSON|expected a list of entries|tune it by --recorded)"
    with pytest.raises(InvalidProblemError, match=rf"^--shapes: {re.escape(path)}.*{wrong}"):
        problems_of_file(path, CPU)


def test_a_missing_file():
    with pytest.raises(click.ClickException, match=r"^--shapes: cannot read nowhere/x.json: No such file or directory$"):
        problems_of_file("nowhere/x.json", CPU)


@pytest.mark.parametrize(
    "problem",
    [
        Problem.mm(2, 3, 4, dtype=torch.float32, layout="tn", device_type="cpu", prepacked=True),
        Problem.baddbmm(5, 2, 3, 4, bias="m1", alpha=2, beta=0, device_type="cuda", precision=Precision(reduced_partials=True)),
    ],
    ids=["mm", "baddbmm"],
)
def test_a_stored_key_reads_as_its_problem(problem):
    assert Problem.from_json(json.loads(problem.key)) == problem
    assert problem_text(problem.key) == str(problem)


def test_a_stored_key_with_an_epilogue_reads_as_its_problem():
    epilogue = trace(lambda acc, x: torch.where(acc > 0, acc, 0.5 * x).to(torch.float16), torch.float32, [torch.empty(3)])
    problem = dataclasses.replace(
        Problem.mm(2, 3, 4, dtype=torch.float32, device_type="cpu"),
        epilogue=epilogue,
        out=Layout.contiguous((2, 3), torch.float16),
    )
    assert Problem.from_json(json.loads(problem.key)) == problem
    assert "where(" in problem_text(problem.key)


def test_keys_of_other_versions_are_shown_unchanged():
    assert problem_text('{"op":"conv"}') == '{"op":"conv"}'
    assert problem_text("no json") == "no json"
    assert machine_text('{"device":"EPYC","isa":"avx2 fma","threads":"2"}') == "device=EPYC, threads=2"
    assert machine_text("no json") == "no json"


def quantized(op, **options):
    return Spec(op=op, **options).problem((16, 256, 512), "here")


E4M3, E5M2, F32, F16, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"dtype": BF16}),
        ({"dtype": "float16", "dtype_b": "float8_e5m2"}, {"dtype_b": E5M2}),
        ({"dtype": "float16", "encoding": "int4", "scales": "group_128"}, {"encoding": "int4", "scales": "group_128"}),
        ({"dtype": "float16", "dtype_b": "uint8", "encoding": "uint4"}, {"encoding": "uint4"}),
        ({"dtype": "float16", "scales": "column", "zeros": True, "scale_dtype": "float32"},
         {"scales": "column", "zeros": True, "scale_dtype": F32}),
        ({"dtype": "float32", "layout": "nn"}, {"dtype": F32, "layout": "nn"}),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_mixed_mm(options, expected):
    expected = {"dtype": F16} | expected
    assert quantized("mixed_mm", **options) == Problem.mixed_mm(16, 256, 512, device_type="cpu", **expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"dtype": "float8_e5m2", "dtype_b": "float8_e4m3fn", "out_dtype": "float16"},
         {"dtype": E5M2, "dtype_b": E4M3, "out_dtype": F16}),
        ({"scales": "block_128x128", "fast_accum": True}, {"scales": "block_128x128", "fast_accum": True}),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_scaled_mm(options, expected):
    assert quantized("scaled_mm", **options) == Problem.scaled_mm(16, 256, 512, device_type="cpu", **expected)


@pytest.mark.parametrize("scales", ["tensor", "row", "column"])
@pytest.mark.parametrize(("scale_dtype", "out_dtype"), [("float32", None), ("float16", None), ("bfloat16", "float32")])
def test_int_mm_mul_problem_matches_a_call(scales, scale_dtype, out_dtype):
    dtype = getattr(torch, scale_dtype)
    a, b = torch.empty(16, 512, dtype=torch.int8), torch.empty(256, 512, dtype=torch.int8).t()
    scale = torch.empty({"tensor": (), "row": (16, 1), "column": (256,)}[scales], dtype=dtype)
    options = {} if out_dtype is None else {"out_dtype": getattr(torch, out_dtype)}
    called = problem_of_call(bound_call("int_mm_mul", (a, b, scale), options))
    assert quantized("int_mm_mul", scales=scales, scale_dtype=scale_dtype, out_dtype=out_dtype) == called
    assert str(called).startswith("int_mm 16x256x512 int8 nt epilogue=mul(acc, x0)")


@pytest.mark.parametrize("bias", ["n", "m1"])
def test_scaled_mm_bias_problem_matches_a_call(bias):
    a, b = torch.empty(16, 512, dtype=E4M3), torch.empty(256, 512, dtype=E4M3).t()
    one, added = torch.ones(()), torch.empty({"n": (256,), "m1": (16, 1)}[bias], dtype=BF16)
    assert quantized("scaled_mm", bias=bias) == problem_of_call(bound_call("scaled_mm", (a, b, one, one), {"bias": added}))


def problem_of_call(call):
    return problem_of(call, epilogue_of(call))


def test_quantized_problems_may_be_prepacked():
    assert quantized("mixed_mm", prepacked=True).prepacked
    assert quantized("int_mm", prepacked=True) == dataclasses.replace(
        Problem.int_mm(16, 256, 512, device_type="cpu"), prepacked=True
    )


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("int_mm", {"dtype": "bfloat16"}, "dtype of int_mm: got 'bfloat16', expected int8"),
        ("int_mm", {"scales": "row"}, "scales: not for int_mm, expected one of int_mm_mul, mixed_mm, scaled_mm"),
        ("mm", {"zeros": True}, "zeros: not for mm, expected mixed_mm"),
        ("mixed_mm", {"dtype": "int8"}, "dtype of mixed_mm: got 'int8'"),
        ("mixed_mm", {"dtype": "float64"}, "dtype of mixed_mm: got 'float64', expected one of float32, float16, bfloat16, tf32"),
        ("mixed_mm", {"scales": "row"}, "scales: got 'row', expected one of none, tensor, column, group_32, group_64, group_128"),
        ("mixed_mm", {"zeros": True}, "zeros: got no scales, expected one of tensor, column, group_32, group_64, group_128"),
        ("mixed_mm", {"encoding": "int4", "dtype_b": "float8_e5m2"},
         "dtype_b: got 'float8_e5m2' with encoding int4, expected uint8 or nothing"),
        ("mixed_mm", {"encoding": "uint4", "dtype_b": "int8"},
         "dtype_b: got 'int8' with encoding uint4, expected uint8 or nothing"),
        ("scaled_mm", {"dtype": "float16"}, "dtype of scaled_mm: got 'float16', expected one of float8_e4m3fn, float8_e5m2"),
        ("scaled_mm", {"scales": "column"}, "scales: got 'column', expected one of tensor, row, block_1x128, block_128x128"),
        ("scaled_mm", {"out_dtype": "float64"},
         "scaled_mm: dtype of out: got torch.float64, expected one of float32, float16, bfloat16"),
        ("int_mm_mul", {"scale_dtype": "float64"},
         "int_mm_mul: dtype of scale: got torch.float64, expected one of float32, float16"),
    ],
)  # fmt: skip
def test_options_that_no_quantized_problem_has(op, options, message):
    with pytest.raises(InvalidProblemError, match=f"^here: {re.escape(message)}"):
        quantized(op, **options)


def test_a_file_with_quantized_shapes(tmp_path):
    entries = [
        {"name": "w8", "op": "mixed_mm", "m": 1, "n": 8, "k": 8, "dtype": "float16", "layout": "nt", "b_dtype": "int8"},
        {"op": "mixed_mm", "m": 1, "n": 8, "k": 64, "dtype_b": "uint8", "scales": "group_32", "zeros": True},
        {"op": "int_mm", "m": 1, "n": 8, "k": 8, "dtype": "int8", "layout": "nt"},
        {"op": "scaled_mm", "m": 1, "n": 8, "k": 8, "scales": "row", "fast_accum": True},
    ]
    assert problems_of_file(file_with(tmp_path, entries), Spec()) == (
        [
            Problem.mixed_mm(1, 8, 8, dtype=F16, device_type="cpu"),
            Problem.mixed_mm(1, 8, 64, dtype=BF16, dtype_b=torch.uint8, scales="group_32", zeros=True, device_type="cpu"),
            Problem.int_mm(1, 8, 8, device_type="cpu"),
            Problem.scaled_mm(1, 8, 8, scales="row", fast_accum=True, device_type="cpu"),
        ],
        [],
    )
