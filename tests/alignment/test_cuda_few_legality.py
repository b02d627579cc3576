"""What the kernel for few rows is legal for, and whether the compiler's figures are the predicted ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune import settings
from gemmtune.backends.cuda.few.build import FewChoice
from gemmtune.backends.cuda.few.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.few.legality import check_config, check_problem, steps_of, tiles_of
from gemmtune.backends.cuda.mixed.legality import is_along_k
from gemmtune.backends.cuda.mixed.weights import Factor, Weights, weights_of
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.problem.trace import trace
from gemmtune.toolchain.compiled import find_cuobjdump
from gemmtune.toolchain.nvcc import find_compiler

SM90 = preset("sm90")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INT4: dict[str, Any] = {"encoding": "int4"}
LINES = "TMA copies contiguous rows that are aligned to 16 bytes"
PLAIN = Shape(eights=2, cols=128, stages=4, warps_n=2, warps_k=4)


def mixed_mm(m: int = 16, n: int = 1024, k: int = 2048, **fields: Any) -> Problem:
    return Problem.mixed_mm(m, n, k, device_type="cuda", **fields)


def has_nvcc() -> bool:
    try:
        find_compiler()
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize(
    ("problem", "arch", "reason"),
    [
        (mixed_mm(), "sm80", "works on CUDA devices of compute capability 9.0, not on sm80"),
        (mixed_mm(), "sm100", "works on CUDA devices of compute capability 9.0, not on sm100"),
        (Problem.mm(16, 128, 128, device_type="cuda"), "sm90", "mm is not an operation of this kernel, which has mixed_mm"),
        (mixed_mm(33), "sm90", "a has 33 rows, at most 32 are served"),
        (mixed_mm(0), "sm90", "the product is empty: nothing is launched"),
        (mixed_mm(k=0), "sm90", "the product is empty: nothing is launched"),
        (mixed_mm(dtype=F32), "sm90", "a is float32, expected bfloat16 or float16"),
        (mixed_mm(dtype_b=torch.float8_e4m3fn), "sm90", "b is float8_e4m3fn, expected integers"),
        (mixed_mm(k=2056), "sm90", "K is 2056, expected a multiple of 16"),
        (mixed_mm(k=2064, **INT4), "sm90", "K is 2064, expected a multiple of 32"),
        (mixed_mm(layout="tn"), "sm90", f"a has strides (1, 16) and offset 0: {LINES}"),
        (
            mixed_mm(layout="nn"),
            "sm90",
            "the transpose of b has strides (1, 1024) and offset 0: "
            "TMA copies contiguous rows, its columns, that are aligned to 16 bytes",
        ),
        (mixed_mm(n=1028, scales="group_128"), "sm90", f"scale_b has strides (1028, 1) and offset 0: {LINES}"),
    ],
)
def test_what_the_kernel_does_not_serve(problem: Problem, arch: str, reason: str) -> None:
    assert check_problem(problem, preset(arch)) == reason


@pytest.mark.parametrize("fields", [{}, INT4, {"encoding": "uint4"}, {"dtype_b": torch.uint8}], ids=str)
@pytest.mark.parametrize("scales", ["none", "tensor", "column", "group_32", "group_64", "group_128"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_what_it_serves(fields: dict[str, Any], scales: str, dtype: torch.dtype) -> None:
    for zeros in (False, True)[: 1 if scales == "none" else 2]:
        problem = mixed_mm(13, 1000, 2048, dtype=dtype, scales=scales, zeros=zeros, **fields)
        assert check_problem(problem, SM90) is None
        assert list(is_along_k(problem)) == [scales.startswith("group")] * len(problem.scales)


def test_an_offset_and_what_an_epilogue_may_not_have_are_refused() -> None:
    problem = mixed_mm()
    moved = dataclasses.replace(problem, a=dataclasses.replace(problem.a, offset=4))
    assert check_problem(moved, SM90) == f"a has strides (2048, 1) and offset 4: {LINES}"
    wide = trace(lambda acc, x: acc * x, F32, [torch.empty(16, 1, dtype=torch.float64)])
    reason = "operand 0 of the epilogue is float64, expected one of bfloat16, float16, float32"
    assert check_problem(dataclasses.replace(problem, epilogue=wide), SM90) == reason
    many = trace(lambda acc, *x: acc + sum(x), F32, [torch.empty(1024, dtype=BF16)] * 8)
    assert check_problem(dataclasses.replace(problem, epilogue=many), SM90) is None
    reason = "the epilogue has 8 operands, a launch passes at most 7"
    assert check_problem(dataclasses.replace(mixed_mm(scales="column"), epilogue=many), SM90) == reason


@pytest.mark.parametrize(
    ("problem", "weights"),
    [
        (mixed_mm(), Weights(bits=8, signed=True)),
        (mixed_mm(scales="column"), Weights(bits=8, signed=True, scale=Factor(dtype=F16, group=0))),
        (mixed_mm(scales="group_64", **INT4), Weights(bits=4, signed=True, scale=Factor(dtype=F16, group=64))),
        (mixed_mm(k=64, scales="group_64", **INT4), Weights(bits=4, signed=True, scale=Factor(dtype=F16, group=0))),
        (
            mixed_mm(scales="group_32", zeros=True, scale_dtype=F32, encoding="uint4"),
            Weights(bits=4, signed=False, scale=Factor(dtype=F32, group=32), zero=Factor(dtype=F32, group=32)),
        ),
    ],
)
def test_what_the_weights_of_a_problem_are(problem: Problem, weights: Weights) -> None:
    assert weights_of(problem) == weights


def test_tiles_and_steps_cover_what_is_left_over() -> None:
    config = Config(shape=PLAIN)
    assert (tiles_of(mixed_mm(n=1032), config), steps_of(mixed_mm(k=2064))) == (9, 17)
    assert steps_of(mixed_mm(k=2080, **INT4)) == 9


@pytest.mark.parametrize(
    ("changes", "problem", "config", "reason"),
    [
        ({}, mixed_mm(17), Config(shape=PLAIN), "a has 17 rows, the kernel 16"),
        (
            {"smem_per_block_bytes": 80 * 1024},
            mixed_mm(),
            Config(shape=PLAIN, blocks=2),
            "takes 90320 bytes of shared memory, a block has 81920",
        ),
        ({}, mixed_mm(), Config(shape=PLAIN, blocks=16), "16 blocks in a cluster, at most 8 are allowed"),
        ({}, mixed_mm(k=256), Config(shape=PLAIN, blocks=3), "K has 2 steps, too few for 3 blocks"),
        (
            {},
            mixed_mm(scales="group_128"),
            Config(shape=Shape(eights=2, cols=256, stages=2, warps_n=1, warps_k=1)),
            "needs about 320 registers for each thread, 255 are left",
        ),
    ],
)
def test_configs_that_are_not_legal(changes: dict[str, int], problem: Problem, config: Config, reason: str) -> None:
    assert check_config(problem, dataclasses.replace(SM90, **changes), config) == reason  # type: ignore[arg-type]


@pytest.mark.skipif(not has_nvcc() or find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (SHAPES[0], INT4 | {"scales": "group_128"}),
        (SHAPES[4], INT4 | {"scales": "group_32", "zeros": True}),
        (SHAPES[8], INT4 | {"scales": "group_128"}),
        (SHAPES[-1], {"scales": "column"}),
        (PLAIN, {"dtype": BF16, "scales": "group_64"}),
        (PLAIN, {"dtype": BF16, "encoding": "uint4"}),
        (PLAIN, {"scales": "column", "zeros": True}),
    ],
    ids=str,
)
def test_the_compiler_needs_what_was_predicted(shape: Shape, fields: dict[str, Any], tmp_path: Path) -> None:
    problem, config = mixed_mm(8 * shape.eights, **fields), Config(shape=shape)
    assert check_config(problem, SM90, config) is None
    with settings.patch(cache_dir=str(tmp_path)):
        [made] = FewChoice.of(config, problem, SM90).artifacts(SM90)
    assert made.threads == shape.threads
    assert made.shared_bytes == made.predicted_bytes
    assert (made.stack_bytes, made.spilled_share) == (0, 0)
    assert made.registers is not None
    assert made.registers <= shape.most_registers(shape.resident(weights_of(problem)))
    products = shape.tiles * shape.eights * weights_of(problem).depth // 16 // shape.warps_k
    assert made.code.count("HMMA.16816.F32") == products
    assert "MEMBAR" not in made.code, "the blocks of a cluster wait for each other at barriers alone"
