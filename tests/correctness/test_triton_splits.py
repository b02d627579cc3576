"""Kernels that divide long sums: values in Triton's interpreter, and properties of the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rotation import rotated

from gemmtune.architectures import inspect_choices
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.splits.decompose import decomposed_choice
from gemmtune.backends.triton.splits.offers import AtomicChoice
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.trace import trace
from gemmtune.toolchain.compiled import CompiledChoice

pytest.importorskip("triton", reason="the interpreter and the compiler are Triton's")

import triton_jobs
from interpreter import Run

pytestmark = pytest.mark.rotates(3)

ATOMIC = [
    Config(block_m=32, block_n=16, block_k=16, stages=1, warps=4, split_k=3),
    Config(block_m=16, block_n=16, block_k=16, stages=1, warps=4, split_k=4),
]
WHOLE = [Config(block_m=16, block_n=16, block_k=16, stages=1, warps=4)]
FAMILIES: dict[str, tuple[triton_jobs.Family, list[Any]]] = {
    "atomic": (triton_jobs.atomic, ATOMIC),
    "decompose": (triton_jobs.decomposed, WHOLE),
}
families = pytest.mark.parametrize("family", rotated([*FAMILIES], 2, "families"))


def _errors(interpreted: Run, family: str, problem: Problem, *, nan_inp: bool = False) -> float:
    function, configs = FAMILIES[family]
    return float(max(interpreted(triton_jobs.errors, problem, configs, family=function, nan_inp=nan_inp)))


@families
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.float32, "tt"), (torch.float16, "nt"), (torch.bfloat16, "tn"), (torch.float64, "nn"), (torch.float16, "nn")],
    ids=str,
)
def test_mm(interpreted: Run, family: str, dtype: torch.dtype, layout: str) -> None:
    assert _errors(interpreted, family, Problem.mm(50, 20, 135, dtype=dtype, layout=layout, device_type="cpu")) <= 1


@families
@pytest.mark.parametrize("shape", [(1, 1, 80), (33, 17, 160), (64, 32, 100), (17, 16, 75)], ids=str)
def test_mm_at_the_edges_of_tiles(interpreted: Run, family: str, shape: tuple[int, int, int]) -> None:
    assert _errors(interpreted, family, Problem.mm(*shape, dtype=torch.float32, device_type="cpu")) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_slices_that_torch_multiplies(interpreted: Run, dtype: torch.dtype) -> None:
    problem = Problem.addmm(7, 19, 640, dtype=dtype, bias="n", alpha=2, beta=0.5, device_type="cpu")
    assert max(interpreted(triton_jobs.errors, problem, WHOLE, family=triton_jobs.decomposed_by_torch)) <= 1


@pytest.mark.parametrize(
    ("family", "bias"),
    [("atomic", "m1"), ("atomic", "mn"), ("atomic", "1n"), ("decompose", "scalar"), ("decompose", "n")],
)
def test_bias_shapes(interpreted: Run, family: str, bias: Any) -> None:
    problem = Problem.addmm(34, 40, 130, dtype=torch.float16, bias=bias, alpha=2, beta=0.5, device_type="cpu")
    assert _errors(interpreted, family, problem) <= 1


def test_batches(interpreted: Run) -> None:
    problem = Problem.baddbmm(3, 34, 40, 130, dtype=torch.float16, bias="mn", alpha=2, beta=0.5, device_type="cpu")
    assert _errors(interpreted, "atomic", problem) <= 1


@families
def test_a_bias_that_is_not_read(interpreted: Run, family: str) -> None:
    problem = Problem.addmm(34, 40, 130, dtype=torch.float32, beta=0, device_type="cpu")
    assert _errors(interpreted, family, problem, nan_inp=True) <= 1


EPILOGUES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "column": (lambda acc, x: acc * x, ((34, 1),)),
    "row-and-block": (lambda acc, x, y: acc / (torch.abs(x) + 2) + y, ((40,), (34, 40))),
    "scalar": (lambda acc, x: torch.nn.functional.silu(acc + x), ((),)),
}


@pytest.mark.parametrize(("family", "name"), list(zip([*FAMILIES, "atomic"], EPILOGUES, strict=True)))
def test_epilogues(interpreted: Run, family: str, name: str) -> None:
    function, sizes = EPILOGUES[name]
    extra = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    problem = Problem.mm(34, 40, 130, dtype=torch.bfloat16, device_type="cpu")
    assert _errors(interpreted, family, replace(problem, epilogue=trace(function, torch.float32, extra))) <= 1


def _layout(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Layout:
    return Layout(size=size, stride=stride, dtype=torch.float32, offset=offset)


STRIDED = {
    "padded": (_layout((33, 130), (135, 1)), _layout((130, 40), (1, 131), 3), _layout((33, 40), (44, 1))),
    "every-second": (_layout((33, 130), (300, 2)), _layout((130, 40), (2, 261)), _layout((33, 40), (1, 33))),
    "expanded": (_layout((33, 130), (1, 0)), _layout((130, 40), (0, 1)), _layout((33, 40), (40, 1))),
}


@pytest.mark.parametrize(
    ("family", "name"),
    rotated([(family, name) for family in FAMILIES for name in STRIDED], 2, "s"),
)
def test_strided_operands(interpreted: Run, family: str, name: str) -> None:
    a, b, out = STRIDED[name]
    assert _errors(interpreted, family, Problem(op="mm", a=a, b=b, out=out)) <= 1


@families
def test_verification_accepts_the_kernels_with_their_own_claims(interpreted: Run, family: str) -> None:
    problem = Problem.addmm(20, 24, 100, dtype=torch.bfloat16, bias="m1", alpha=2, beta=0.5, device_type="cpu")
    function, configs = FAMILIES[family]
    found = interpreted(triton_jobs.verdicts, problem, configs, family=function)
    assert [verdict.status for verdict in found] == [Status.OK] * len(configs), [verdict.reason for verdict in found]


QUANTIZED = {
    "int_mm": Problem.int_mm(33, 40, 134, device_type="cpu"),
    "scaled_mm-row": Problem.scaled_mm(33, 40, 160, scales="row", device_type="cpu"),
    "scaled_mm-blocks": Problem.scaled_mm(3, 140, 150, scales="block_1x128", device_type="cpu"),
    "mixed_mm-int4": Problem.mixed_mm(17, 40, 256, encoding="uint4", scales="group_64", zeros=True, device_type="cpu"),
}


@pytest.mark.parametrize("name", rotated(list(QUANTIZED), 2, "split sums"))
def test_quantized_operations(interpreted: Run, name: str) -> None:
    function, (config, *_) = FAMILIES["atomic"]
    found = interpreted(triton_jobs.verdicts, QUANTIZED[name], [replace(config, block_k=32)], family=function)
    assert [verdict.status for verdict in found] == [Status.OK], found[0].reason


def _atomic(problem: Problem, arch: str) -> list[CompiledChoice]:
    block_k = 128 // problem.dtype.itemsize
    config = Config(block_m=64, block_n=64, block_k=block_k, stages=3, warps=4, split_k=8)
    return [AtomicChoice.of(problem, preset(arch), config)]


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
    "int8-nt": Problem.int_mm(256, 512, 16384, layout="nt", device_type="cuda"),
}


OFFERED = {"atomic": _atomic, "decompose": _decomposed}


PAIRS = [(f, n, arch) for f in OFFERED for n in COMPILED if (f, n) != ("decompose", "int8-nt") for arch in ("sm80", "sm90")]


@pytest.mark.parametrize(("family", "name", "arch"), rotated(PAIRS, 6, "splits"))
def test_choices_compile_within_predicted_resources_to_the_expected_instructions(arch: str, family: str, name: str) -> None:
    found = OFFERED[family](COMPILED[name], arch)
    assert found
    inspections = list(inspect_choices(tuple(found)))
    wrong = [f"{inspection}: {text}" for inspection in inspections for text in inspection.problems]
    assert not wrong, "\n".join(wrong)


def test_the_last_program_sees_the_other_programs_sums() -> None:
    problem, device = COMPILED["bf16-nt"], preset("sm90")
    split = Config(block_m=128, block_n=64, block_k=64, stages=3, warps=4, split_k=8)
    written = {
        TritonChoice.of(problem, device, split): "st.global",
        AtomicChoice.of(problem, device, split): "atom.global.gpu.relaxed.add",
    }
    for choice, instruction in written.items():
        code = choice.artifacts(device)[0].code
        counted = code.index("atom.global.gpu.acq_rel.add")
        assert code.rindex(instruction, 0, counted) < code.rindex("bar.sync", 0, counted)
        assert "ld.global.cg" not in code[:counted]
        assert "ld.global.cg" in code[counted:]
