"""Decompose-K: values in Triton's interpreter, and properties of the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rotation import rotated

from gemmtune.architectures import inspect_choices
from gemmtune.backends.triton.backend import choice_named
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.persistent import PersistentChoice
from gemmtune.backends.triton.splits.decompose import decomposed_choice
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.trace import trace
from gemmtune.toolchain.compiled import CompiledChoice

pytest.importorskip("triton", reason="the interpreter and the compiler are Triton's")

import triton_jobs
from interpreter import Run

pytestmark = pytest.mark.rotates(9)

WHOLE = [Config(block_m=16, block_n=16, block_k=16, stages=1, warps=4)]


def _errors(interpreted: Run, problem: Problem, *, nan_inp: bool = False) -> float:
    return float(max(interpreted(triton_jobs.errors, problem, WHOLE, family=triton_jobs.decomposed, nan_inp=nan_inp)))


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.float32, "tt"), (torch.float16, "nt"), (torch.bfloat16, "tn"), (torch.float64, "nn"), (torch.float16, "nn")],
    ids=str,
)
def test_mm(interpreted: Run, dtype: torch.dtype, layout: str) -> None:
    assert _errors(interpreted, Problem.mm(50, 20, 135, dtype=dtype, layout=layout, device_type="cpu")) <= 1


@pytest.mark.parametrize("shape", [(1, 1, 80), (33, 17, 160), (64, 32, 100), (17, 16, 75)], ids=str)
def test_mm_at_the_edges_of_tiles(interpreted: Run, shape: tuple[int, int, int]) -> None:
    assert _errors(interpreted, Problem.mm(*shape, dtype=torch.float32, device_type="cpu")) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_slices_that_torch_multiplies(interpreted: Run, dtype: torch.dtype) -> None:
    problem = Problem.addmm(7, 19, 640, dtype=dtype, bias="n", alpha=2, beta=0.5, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, WHOLE, family=triton_jobs.decomposed_by_torch)) <= 1


@pytest.mark.parametrize("bias", rotated(["m1", "mn", "1n", "scalar", "n"], 2, "bias"))
def test_bias_shapes(interpreted: Run, bias: Any) -> None:
    problem = Problem.addmm(34, 40, 130, dtype=torch.float16, bias=bias, alpha=2, beta=0.5, device_type="cpu")
    assert _errors(interpreted, problem) <= 1


def test_a_bias_that_is_not_read(interpreted: Run) -> None:
    problem = Problem.addmm(34, 40, 130, dtype=torch.float32, beta=0, device_type="cpu")
    assert _errors(interpreted, problem, nan_inp=True) <= 1


EPILOGUES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "column": (lambda acc, x: acc * x, ((34, 1),)),
    "row-and-block": (lambda acc, x, y: acc / (torch.abs(x) + 2) + y, ((40,), (34, 40))),
    "scalar": (lambda acc, x: torch.nn.functional.silu(acc + x), ((),)),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(interpreted: Run, name: str) -> None:
    function, sizes = EPILOGUES[name]
    extra = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    problem = Problem.mm(34, 40, 130, dtype=torch.bfloat16, device_type="cpu")
    assert _errors(interpreted, replace(problem, epilogue=trace(function, torch.float32, extra))) <= 1


def _layout(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Layout:
    return Layout(size=size, stride=stride, dtype=torch.float32, offset=offset)


STRIDED = {
    "padded": (_layout((33, 130), (135, 1)), _layout((130, 40), (1, 131), 3), _layout((33, 40), (44, 1))),
    "every-second": (_layout((33, 130), (300, 2)), _layout((130, 40), (2, 261)), _layout((33, 40), (1, 33))),
    "expanded": (_layout((33, 130), (1, 0)), _layout((130, 40), (0, 1)), _layout((33, 40), (40, 1))),
}


@pytest.mark.parametrize("name", rotated([*STRIDED], 2, "s"))
def test_strided_operands(interpreted: Run, name: str) -> None:
    a, b, out = STRIDED[name]
    assert _errors(interpreted, Problem(op="mm", a=a, b=b, out=out)) <= 1


def test_verification_accepts_the_kernels_with_their_own_claims(interpreted: Run) -> None:
    problem = Problem.addmm(20, 24, 100, dtype=torch.bfloat16, bias="m1", alpha=2, beta=0.5, device_type="cpu")
    found = interpreted(triton_jobs.verdicts, problem, WHOLE, family=triton_jobs.decomposed)
    assert [verdict.status for verdict in found] == [Status.OK] * len(WHOLE), [verdict.reason for verdict in found]


def _decomposed(problem: Problem, arch: str) -> list[CompiledChoice]:
    config = Config(block_m=64, block_n=64, block_k=128 // problem.dtype.itemsize, stages=3, warps=4)
    device = preset(arch)
    return [decomposed_choice(problem, device, 32, inner, pdl=device.capability >= 90) for inner in (config, None)]


COMPILED = {
    "bf16-nt": Problem.mm(384, 320, 16384, device_type="cuda"),
    "f16-nn-edges": Problem.mm(201, 264, 16384, dtype=torch.float16, layout="nn", device_type="cuda"),
    "tf32-tn": Problem.mm(
        256, 512, 16384, dtype=torch.float32, layout="tn", precision=Precision(input_mode="tf32"), device_type="cuda"
    ),
    "f32-bias": Problem.addmm(256, 256, 16384, dtype=torch.float32, bias="n", device_type="cuda"),
}


@pytest.mark.parametrize(("name", "arch"), rotated([(n, arch) for n in COMPILED for arch in ("sm80", "sm90")], 3, "splits"))
def test_choices_compile_within_predicted_resources_to_the_expected_instructions(arch: str, name: str) -> None:
    found = _decomposed(COMPILED[name], arch)
    assert found
    inspections = list(inspect_choices(tuple(found)))
    wrong = [f"{inspection}: {text}" for inspection in inspections for text in inspection.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.turn(0, 4)
@pytest.mark.parametrize(("dtype", "layout"), rotated([(torch.float32, "nn"), (torch.float16, "nt")], 2, "parts"), ids=str)
def test_parts_in_turn(interpreted: Run, dtype: torch.dtype, layout: str) -> None:
    problem = Problem.addmm(40, 20, 135, dtype=dtype, layout=layout, bias="n", alpha=2, beta=0.5, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, WHOLE, family=triton_jobs.in_parts)) <= 1
    assert interpreted(triton_jobs.difference_in_parts, problem, WHOLE[0], [1, 17, 33]) is None


@pytest.mark.turn(1, 4)
def test_parts_in_turn_by_persistent_programs(interpreted: Run) -> None:
    """The last part of K is shorter, and tiles end at other steps than parts."""
    problem = Problem.addmm(40, 24, 136, dtype=torch.float16, layout="nt", bias="n", alpha=2, beta=0.5, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, WHOLE, family=triton_jobs.persistent_in_parts)) <= 1
    assert interpreted(triton_jobs.difference_in_parts, problem, WHOLE[0], [17]) is None


def test_parts_in_turn_are_legal_where_splits_are_whole_blocks() -> None:
    problem, device = COMPILED["bf16-nt"], preset("sm90")
    config = Config(block_m=128, block_n=64, block_k=64, stages=3, warps=4)
    choice = TritonChoice.of(problem, device, config)
    assert [x.name for x in choice.with_parts(2, device)] == ["triton:mm_128x64x64_s3_w4_k2", "triton:runs_128x64x64_s3_w4_r2"]
    assert [x.name for x in choice.with_parts(16, device)] == ["triton:mm_128x64x64_s3_w4_k16"]
    assert not choice.with_parts(300, device)
    large = TritonChoice.of(problem, device, replace(config, block_n=256))
    assert [x.name for x in large.with_parts(2, device)][-1:] == ["triton:runs_128x128x64_s3_w8_r2"], "two sums fit in registers"
    (split, runs) = choice.with_parts(2, device)
    assert split.claims == runs.claims
    problem = Problem.mm(512, 2048, 512, layout="nt", device_type="cuda")
    (persistent,) = PersistentChoice.of(problem, device, config).with_parts(2, device)
    assert (persistent.name, persistent.claims.reduction) == (
        "triton:persistent_128x64x64_s3_w4_r2",
        TritonChoice.of(problem, device, replace(config, split_k=2)).claims.reduction,
    )
    for made in (runs, persistent):
        assert type(made.at(problem, device)) is type(made)
        again = choice_named(made.name, made.problem, device)
        assert again is not None
        assert again.content_hash == made.content_hash
    assert [x for inspection in inspect_choices((runs, persistent)) for x in inspection.problems] == []


@pytest.mark.turn(4, 8)
def test_the_last_program_sees_the_other_programs_sums() -> None:
    problem, device = COMPILED["bf16-nt"], preset("sm90")
    split = Config(block_m=128, block_n=64, block_k=64, stages=3, warps=4, split_k=8)
    code = TritonChoice.of(problem, device, split).artifacts(device)[0].code
    counted = code.index("atom.global.gpu.acq_rel.add")
    assert code.rindex("st.global", 0, counted) < code.rindex("bar.sync", 0, counted)
    assert "ld.global.cg" not in code[:counted]
    assert "ld.global.cg" in code[counted:]
