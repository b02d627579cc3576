"""Rendering: facts that the Triton source of a kernel depends on."""

from __future__ import annotations

import ast
from dataclasses import replace

import jinja2
import pytest
import torch

from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.source import Writer, render_source
from gemmtune.backends.triton.spec import specialise
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.toolchain.render import environment, load_template, template_digest
from gemmtune.toolchain.triton_kernels import Source

CONFIG = Config(block_m=64, block_n=64, block_k=32, stages=3, warps=4)
SPLIT = replace(CONFIG, split_k=4)


def test_an_undefined_name_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'missing' is undefined"):
        environment().from_string("{{ missing }}").render()


def test_the_signature_appears_once() -> None:
    writer = Writer(specialise(_mm(512, 512, 512), CONFIG), "", {}, {})
    with pytest.raises(AssertionError, match="a template calls def_kernel once"):
        writer.finished("a text without it")


def test_the_digest_is_of_the_template_text() -> None:
    text = load_template("gemmtune.backends.triton", "mm.py.jinja")
    assert "def_kernel" in text
    assert len(template_digest("gemmtune.backends.triton", "mm.py.jinja")) == 64


def _source(problem: Problem, config: Config = CONFIG, **options: bool) -> Source:
    return render_source(specialise(problem, config, **options))


def _mm(m: int, n: int, k: int, **options: object) -> Problem:
    return Problem.mm(m, n, k, device_type="cuda", **options)  # type: ignore[arg-type]


EPILOGUE = trace(lambda acc, x: torch.tanh(acc) * x, torch.float32, [torch.zeros(1024, dtype=torch.bfloat16)])
PROBLEMS = {
    "mm": _mm(512, 1024, 256),
    "mm-odd": _mm(511, 1023, 255),
    "addmm": Problem.addmm(512, 1024, 256, alpha=2, beta=3, device_type="cuda"),
    "bmm": Problem.bmm(4, 512, 1024, 256, device_type="cuda"),
    "baddbmm-fp64": Problem.baddbmm(4, 512, 1024, 256, dtype=torch.float64, beta=2, device_type="cuda"),
    "epilogue": replace(_mm(512, 1024, 256), epilogue=EPILOGUE),
}


@pytest.mark.parametrize("config", [CONFIG, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_source_is_python_and_declares_each_argument_once(name: str, config: Config) -> None:
    source = _source(PROBLEMS[name], config)
    tree = ast.parse(source.text)
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == source.function)
    declared = [a.arg for a in function.args.args]
    assert declared == [a.name for a in source.arguments]
    assert len(set(declared)) == len(declared)
    used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    assert set(declared) <= used


def test_the_sum_over_splits_is_unrolled_as_far_as_registers_last() -> None:
    for block_m, block_n, unrolled in ((32, 64, 4), (64, 64, 4), (128, 64, 2), (128, 128, 1), (256, 128, 1)):
        config = replace(SPLIT, block_m=block_m, block_n=block_n)
        assert f"loop_unroll_factor={unrolled})" in _source(PROBLEMS["mm"], config).text, config


def test_sizes_and_strides_are_arguments() -> None:
    names = {a.name for a in _source(PROBLEMS["mm"]).arguments}
    assert names >= {"size_m", "size_n", "size_k", "stride_a_r", "stride_b_c", "stride_out_r"}


def test_shapes_of_one_alignment_class_share_a_source() -> None:
    assert _source(_mm(512, 1024, 256)) == _source(_mm(4096, 6144, 4096)) == _source(_mm(64, 57344, 8192))


def test_few_rows_share_a_source_whatever_their_number() -> None:
    config = Config(block_m=16, block_n=64, block_k=128, stages=4, warps=4)
    assert _source(_mm(1, 6144, 4096), config) == _source(_mm(7, 6144, 4096), config) == _source(_mm(16, 4096, 14336), config)


@pytest.mark.parametrize(
    "other",
    [
        _mm(512, 1023, 256),
        _mm(512, 1024, 250),
        _mm(512, 1024, 256, layout="nn"),
        _mm(512, 1024, 256, dtype=torch.float16),
        replace(_mm(512, 1024, 256), a=Layout(size=(512, 256), stride=(256, 1), dtype=torch.bfloat16, offset=1)),
        replace(_mm(512, 1024, 256), a=Layout(size=(512, 256), stride=(257, 1), dtype=torch.bfloat16)),
        PROBLEMS["epilogue"],
    ],
    ids=["odd-n", "ragged-k", "layout", "dtype", "offset", "odd-stride", "epilogue"],
)
def test_operand_hints_are_in_source_and_signature(other: Problem) -> None:
    assert _source(other) != _source(PROBLEMS["mm"])


def test_hints_match_sizes_strides_and_pointers() -> None:
    problem = replace(
        _mm(512, 1020, 256),
        a=Layout(size=(512, 256), stride=(264, 1), dtype=torch.bfloat16, offset=2),
        out=Layout(size=(512, 1020), stride=(1021, 1), dtype=torch.bfloat16),
    )
    divisors = {a.name: a.divisor for a in _source(problem).arguments}
    assert divisors["a_ptr"] == 4
    assert divisors["stride_a_r"] == 8
    assert divisors["size_n"] == 4
    assert divisors["stride_out_r"] == 1
    assert divisors["out_ptr"] == 16


def test_offsets_past_32_bits_are_computed_in_64() -> None:
    wide = replace(_mm(512, 1024, 256), a=Layout(size=(512, 256), stride=(2**23, 1), dtype=torch.bfloat16))
    source = _source(wide)
    assert "(a_rows[:, None]).to(tl.int64) * stride_a_r" in source.text
    assert {a.name: a.type for a in source.arguments}["stride_a_r"] == "i64"
    assert "int64" not in _source(PROBLEMS["mm"]).text


def test_a_bias_is_loaded_at_its_own_size() -> None:
    row = _source(Problem.addmm(512, 1024, 256, bias="n", device_type="cuda")).text
    column = _source(Problem.addmm(512, 1024, 256, bias="m1", device_type="cuda")).text
    scalar = _source(Problem.addmm(512, 1024, 256, bias="scalar", device_type="cuda")).text
    assert "tl.load(inp_ptr + cols[None, :], mask=mask_n[None, :], other=0)" in row
    assert "tl.load(inp_ptr + rows[:, None], mask=mask_m[:, None], other=0)" in column
    assert "tl.load(inp_ptr)" in scalar


def test_beta_zero_never_names_the_bias() -> None:
    source = _source(Problem.addmm(512, 1024, 256, beta=0, device_type="cuda"))
    assert "inp_ptr" not in source.text


def test_scalars_have_the_accumulators_type() -> None:
    types = {a.name: a.type for a in _source(PROBLEMS["baddbmm-fp64"]).arguments}
    assert types["beta"] == "fp64"
    assert {a.name: a.type for a in _source(PROBLEMS["addmm"]).arguments}["beta"] == "fp32"


def test_one_matrix_of_a_batch_shares_the_kernel_of_mm() -> None:
    one = Problem.bmm(1, 512, 1024, 256, device_type="cuda")
    assert _source(one) == _source(PROBLEMS["mm"])


def test_the_number_of_splits_and_the_group_are_arguments() -> None:
    assert _source(PROBLEMS["mm"], SPLIT) == _source(PROBLEMS["mm"], replace(SPLIT, split_k=8, group_m=4))
