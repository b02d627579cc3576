"""Kernels for few rows: values in Triton's interpreter, and properties of the compiled kernels."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from rotation import rotated

from gemmtune.architectures import inspect_choices
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.configs import Config
from gemmtune.backends.triton.padding import PaddedChoice, padded_choices
from gemmtune.backends.triton.swap import swapped_choices, transposed
from gemmtune.backends.triton.vec import vector_choices
from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace

pytest.importorskip("triton", reason="the interpreter and the compiler are Triton's")

import triton_jobs
from interpreter import Run

pytestmark = pytest.mark.rotates(9)

SWAPPED = [
    Config(block_m=64, block_n=16, block_k=32, stages=1, warps=4),
    Config(block_m=32, block_n=16, block_k=16, stages=1, warps=4, split_k=3),
]
VECTOR = [
    Config(block_m=4, block_n=8, block_k=64, stages=2, warps=2),
    Config(block_m=4, block_n=32, block_k=16, stages=2, warps=2),
]
FAMILIES: dict[str, tuple[triton_jobs.Family, list[Config]]] = {
    "swapped": (triton_jobs.swapped, SWAPPED),
    "vector": (triton_jobs.vector, VECTOR),
}


def for_some(name: str, values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrise with half of the values for one family and half for the other; the rest is for the next commit."""
    return pytest.mark.parametrize(
        ("family", name), rotated([*itertools.product(FAMILIES, values)], 2, f"few rows, {name}"), ids=str
    )


families = pytest.mark.parametrize("family", FAMILIES)


def _errors(interpreted: Run, family: str, problem: Problem, *, nan_inp: bool = False, **changes: int) -> float:
    function, configs = FAMILIES[family]
    changed = [replace(config, **changes) for config in configs]
    return float(max(interpreted(triton_jobs.errors, problem, changed, family=function, nan_inp=nan_inp)))


@for_some(
    "given", [(torch.float32, "tt"), (torch.float16, "nt"), (torch.bfloat16, "tn"), (torch.float64, "nn"), (torch.float16, "nn")]
)
def test_mm(interpreted: Run, family: str, given: tuple[torch.dtype, str]) -> None:
    dtype, layout = given
    assert _errors(interpreted, family, Problem.mm(3, 37, 75, dtype=dtype, layout=layout, device_type="cpu")) <= 1


@for_some("shape", [(1, 1, 1), (1, 33, 64), (2, 32, 128), (4, 64, 63)])
def test_mm_at_the_edges_of_tiles(interpreted: Run, family: str, shape: tuple[int, int, int]) -> None:
    assert _errors(interpreted, family, Problem.mm(*shape, dtype=torch.float32, device_type="cpu"), split_k=1) <= 1


@for_some("added", ["addmm n", "baddbmm mn", "addmm m1", "baddbmm 1n", "addmm scalar", "baddbmm n"])
def test_bias_shapes(interpreted: Run, family: str, added: str) -> None:
    op, bias = added.split()
    shape = (2, 3, 40, 65) if op == "baddbmm" else (3, 40, 65)
    problem = getattr(Problem, op)(*shape, dtype=torch.float16, bias=bias, alpha=2, beta=0.5, device_type="cpu")
    assert _errors(interpreted, family, problem) <= 1


EPILOGUES: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "column": (lambda acc, x: acc * x, ((3, 1),)),
    "row-and-block": (lambda acc, x, y: acc / (torch.abs(x) + 2) + y, ((40,), (3, 40))),
    "scalar": (lambda acc, x: torch.nn.functional.silu(acc + x), ((),)),
}


@for_some("name", EPILOGUES)
def test_epilogues(interpreted: Run, family: str, name: str) -> None:
    function, sizes = EPILOGUES[name]
    extra = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    problem = Problem.mm(3, 40, 70, dtype=torch.bfloat16, device_type="cpu")
    assert _errors(interpreted, family, replace(problem, epilogue=trace(function, torch.float32, extra))) <= 1


def _layout(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Layout:
    return Layout(size=size, stride=stride, dtype=torch.float32, offset=offset)


STRIDED = {
    "padded": (_layout((3, 70), (75, 1)), _layout((70, 40), (1, 71), 3), _layout((3, 40), (44, 1))),
    "every-second": (_layout((3, 70), (200, 2)), _layout((70, 40), (2, 141)), _layout((3, 40), (1, 3))),
    "expanded": (_layout((3, 70), (1, 0)), _layout((70, 40), (0, 1)), _layout((3, 40), (40, 1))),
}


@for_some("name", STRIDED)
def test_strided_operands(interpreted: Run, family: str, name: str) -> None:
    a, b, out = STRIDED[name]
    assert _errors(interpreted, family, Problem(op="mm", a=a, b=b, out=out)) <= 1


@families
def test_an_empty_sum_and_a_bias_that_is_not_read(interpreted: Run, family: str) -> None:
    empty = Problem.addmm(3, 40, 0, dtype=torch.float32, bias="n", beta=0.5, device_type="cpu")
    assert _errors(interpreted, family, empty, split_k=1) <= 1
    unread = Problem.addmm(3, 40, 65, dtype=torch.float32, beta=0, device_type="cpu")
    assert _errors(interpreted, family, unread, nan_inp=True, split_k=1) <= 1


@families
def test_verification_accepts_the_kernels_with_their_own_claims(interpreted: Run, family: str) -> None:
    problem = Problem.addmm(3, 40, 65, dtype=torch.bfloat16, bias="m1", alpha=2, beta=0.5, device_type="cpu")
    function, configs = FAMILIES[family]
    found = interpreted(triton_jobs.verdicts, problem, configs, family=function)
    assert [verdict.status for verdict in found] == [Status.OK, Status.OK], [verdict.reason for verdict in found]


def test_transposing_twice_is_the_problem_itself() -> None:
    problem = Problem.baddbmm(2, 3, 40, 65, dtype=torch.float16, bias="mn", alpha=2, beta=0.5, device_type="cuda")
    assert transposed(problem).a == problem.b.transposed
    assert transposed(transposed(problem)) == problem


COMPILED = {
    "bf16-nt": Problem.mm(16, 6144, 4096, device_type="cuda"),
    "f16-nn": Problem.addmm(3, 4096, 14336, dtype=torch.float16, layout="nn", device_type="cuda"),
    "f32-nt": Problem.mm(2, 1000, 4096, dtype=torch.float32, device_type="cuda"),
    "bmm-bf16-odd": Problem.bmm(3, 4, 1001, 999, device_type="cuda"),
    "f16-nt-one-row": Problem.mm(1, 4096, 4096, dtype=torch.float16, device_type="cuda"),
    "f64-nt": Problem.mm(1, 512, 2048, dtype=torch.float64, device_type="cuda"),
}


@pytest.mark.parametrize(("name", "arch"), rotated([*itertools.product(COMPILED, ("sm75", "sm80", "sm90", "sm100"))], 5, "small"))
def test_choices_compile_within_predicted_resources_to_the_expected_instructions(arch: str, name: str) -> None:
    device, problem = preset(arch), COMPILED[name]
    offered = (swapped_choices(problem, device, 3), vector_choices(problem, device, 3))
    choices = [choice for found in offered for choice in rotated(found[::2], 2, f"{arch} {name}")]
    inspections = list(inspect_choices(tuple(choices)))
    wrong = [f"{inspection}: {text}" for inspection in inspections for text in inspection.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.turn(0, 8)
def test_launches_overlap_if_supported_and_kernels_wait_inside() -> None:
    problem = Problem.mm(3, 512, 4096, device_type="cuda")
    for choice in (*vector_choices(problem, preset("sm90"), 1), *swapped_choices(problem, preset("sm90"), 1)):
        text = choice.artifacts(preset("sm90"))[0].code
        wait, trigger = text.index("griddepcontrol.wait"), text.index("griddepcontrol.launch_dependents")
        reading = re.search(r"cp\.async|ld\.global", text)
        assert reading is not None
        assert wait < trigger < reading.start()
        assert "ld.global" not in text[:wait]
        (other,) = choice.launch_variants()
        assert choice.name.replace("_pdl", "") == other.name
        assert other.compile_key == choice.compile_key
        assert other.content_hash != choice.content_hash
        assert other.launch_variants()[0] == choice
    (older,) = vector_choices(problem, preset("sm80"), 1)
    assert not older.launch_variants()
    assert "griddepcontrol" not in older.artifacts(preset("sm80"))[0].code


@pytest.mark.turn(5, 8)
def test_direct_loads_of_few_rows_leave_the_cache_first() -> None:
    shared = Problem.bmm(3, 1, 512, 4096, device_type="cuda")
    shared = replace(shared, b=replace(shared.b, stride=(0, *shared.b.stride[1:])))
    for problem, hinted in ((Problem.mm(1, 4096, 4096, device_type="cuda"), True), (shared, False)):
        direct = [x for x in vector_choices(problem, preset("sm90"), None) if x.config.stages == 1]
        assert {(x.config.block_n, x.config.block_k) for x in direct} >= {(2, 2048), (4, 1024)}
        code = direct[0].artifacts(preset("sm90"))[0].code
        assert "cp.async" not in code
        assert ("evict_first" in code) == hinted
    # Without asynchronous copies, and where the columns are contiguous, only the other table applies.
    for problem in (Problem.mm(1, 1001, 999, device_type="cuda"), Problem.mm(1, 4096, 4096, layout="nn", device_type="cuda")):
        assert not {x.config.block_k for x in vector_choices(problem, preset("sm90"), None)} & {2048, 4096}


def test_a_copy_lets_the_product_start_and_waits_before_it_reads() -> None:
    problem, device = Problem.mm(1000, 1001, 999, device_type="cuda"), preset("sm90")
    config = Config(block_m=64, block_n=64, block_k=64, stages=4, warps=4)
    (choice,) = padded_choices(problem, device, lambda aligned: [TritonChoice.of(aligned, device, config)])
    assert choice.name.endswith("_pdl_pad")
    copy, product = (artifact.code for artifact in choice.artifacts(device))
    trigger, wait = copy.index("griddepcontrol.launch_dependents"), copy.index("griddepcontrol.wait")
    assert trigger < wait < copy.index("ld.global")
    assert product.index("griddepcontrol.wait") < product.index("cp.async")
    (other,) = choice.launch_variants()
    assert isinstance(other, PaddedChoice)
    assert other.name == choice.name.replace("_pdl", "")
    assert (other.compile_key, other.inner.config.pdl) == (choice.compile_key, False)
