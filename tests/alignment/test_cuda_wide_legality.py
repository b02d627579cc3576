"""What the kernel for more rows is legal for, and whether the compiler's figures are the predicted ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from sass import read_early

from gemmtune import settings
from gemmtune.backends.cuda.mixed.weights import weights_of
from gemmtune.backends.cuda.wide.build import INSTRUCTIONS, WideChoice
from gemmtune.backends.cuda.wide.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.wide.legality import check_config, check_problem, steps_of, tiles_of
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.toolchain.compiled import find_cuobjdump
from gemmtune.toolchain.nvcc import find_compiler

SM90 = preset("sm90")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MOST_LINES = 10_000
"""Of a listing in SASS, with two lines for each instruction."""
INT4: dict[str, Any] = {"encoding": "int4"}
PLAIN = Shape(rows=128, groups=2, tiles=1, line=128, stages=4)
COMPILED: list[dict[str, Any]] = [
    {"scales": "column", "zeros": True},
    {"dtype": BF16, "scales": "column"},
    {"dtype_b": torch.uint8},
    {"dtype": BF16, "scales": "group_64"},
    {"scales": "column"},
    INT4 | {"scales": "group_128"},
    INT4 | {"dtype": BF16, "scales": "group_32"},
    {"encoding": "uint4", "scales": "group_32", "zeros": True},
    INT4 | {"scales": "column"},
]
"""One for each shape."""
LARGE = Shape(rows=256, groups=2, tiles=1, line=64, stages=5)


def mixed_mm(m: int = 128, n: int = 1024, k: int = 2048, **fields: Any) -> Problem:
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
        (Problem.mm(64, 128, 128, device_type="cuda"), "sm90", "mm is not an operation of this kernel, which has mixed_mm"),
        (mixed_mm(0), "sm90", "the product is empty: nothing is launched"),
        (mixed_mm(dtype=F32), "sm90", "a is float32, expected bfloat16 or float16"),
        (mixed_mm(k=2056), "sm90", "K is 2056, expected a multiple of 16"),
        (mixed_mm(k=2064, **INT4), "sm90", "K is 2064, expected a multiple of 32"),
    ],
)
def test_what_the_kernel_does_not_serve(problem: Problem, arch: str, reason: str) -> None:
    assert check_problem(problem, preset(arch)) == reason


@pytest.mark.parametrize("fields", [{}, INT4, {"encoding": "uint4"}, {"dtype_b": torch.uint8}], ids=str)
@pytest.mark.parametrize("scales", ["none", "tensor", "column", "group_32", "group_128"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_what_it_serves_with_some_shape(fields: dict[str, Any], scales: str, dtype: torch.dtype) -> None:
    for zeros in (False, True)[: 1 if scales == "none" else 2]:
        problem = mixed_mm(77, 1000, 2048, dtype=dtype, scales=scales, zeros=zeros, **fields)
        assert check_problem(problem, SM90) is None
        shapes = SHAPES[weights_of(problem).bits]
        legal = [shape for shape in shapes if check_config(problem, SM90, Config(shape=shape)) is None]
        assert len(legal) >= 3


def test_tiles_and_steps_cover_what_is_left_over() -> None:
    config = Config(shape=PLAIN)
    assert (tiles_of(mixed_mm(129, 1032), config), steps_of(mixed_mm(k=2064), config)) == ((2, 9), 17)
    assert steps_of(mixed_mm(k=2080, **INT4), config) == 9


def test_sums_of_others_have_room_beside_stages_or_take_their_place() -> None:
    weights = weights_of(mixed_mm())
    assert PLAIN.shared_bytes(weights, 2) == PLAIN.shared_bytes(weights) + 64 * 128 * 4
    assert LARGE.shared_bytes(weights, 2) == LARGE.shared_bytes(weights)


@pytest.mark.parametrize(
    ("changes", "problem", "config", "reason"),
    [
        (
            {"smem_per_block_bytes": 160 * 1024},
            mixed_mm(),
            Config(shape=PLAIN, blocks=2),
            "takes 230400 bytes of shared memory, a block has 163840",
        ),
        (
            {},
            mixed_mm(),
            Config(shape=dataclasses.replace(PLAIN, resident=2)),
            "takes 197632 bytes of shared memory, too many for 2 blocks on a multiprocessor",
        ),
        (
            {},
            mixed_mm(),
            Config(shape=PLAIN, blocks=16),
            "16 blocks in a cluster, at most 8 are allowed",
        ),
        (
            {},
            mixed_mm(),
            Config(shape=dataclasses.replace(PLAIN, rows=64, tiles=4, line=64)),
            "a tile has 512 columns, at most 256 are copied at once",
        ),
        ({}, mixed_mm(k=256), Config(shape=PLAIN, blocks=3), "K has 2 steps, too few for 3 blocks"),
        (
            {},
            mixed_mm(),
            Config(shape=dataclasses.replace(PLAIN, batch=8)),
            "a stage has 128 of K, which is no even number of batches of lines",
        ),
        (
            {},
            mixed_mm(),
            Config(shape=dataclasses.replace(LARGE, groups=1)),
            "registers are left by one group of warps to two others alone",
        ),
        (
            {},
            mixed_mm(scales="column"),
            Config(shape=dataclasses.replace(LARGE, rows=192, tiles=2, stages=3)),
            "needs about 258 registers for each thread, 240 are left",
        ),
    ],
)
def test_configs_that_are_not_legal(changes: dict[str, int], problem: Problem, config: Config, reason: str) -> None:
    assert check_config(problem, dataclasses.replace(SM90, **changes), config) == reason  # type: ignore[arg-type]


def test_a_listing_in_which_sums_are_read_before_the_wait_is_found() -> None:
    first = "HGMMA.64x64x16.F32 R88, R24, gdesc[UR8], R88 ;"
    last = "/*0100*/ HGMMA.64x64x16.F32 R120, R28, gdesc[UR8], R120, gsb0 ; /* 0x01 */"
    bare = ["WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", "LDS.U16 R23, [R87] ;"]
    read = "F2FP.F16.F32.PACK_AB R3, R89, R151 ;"
    end = ["WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", read]
    assert read_early("\n".join([first, last, *bare, *end])) == []
    assert read_early("\n".join([first, last, *bare, read, *end])) == [read]


@pytest.mark.skipif(not has_nvcc() or find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
@pytest.mark.parametrize(("shape", "fields"), list(zip(SHAPES[8] + SHAPES[4], COMPILED, strict=True)), ids=str)
def test_the_compiler_needs_what_was_predicted(shape: Shape, fields: dict[str, Any], tmp_path: Path) -> None:
    problem, config = mixed_mm(shape.rows, **fields), Config(shape=shape)
    assert check_config(problem, SM90, config) is None
    with settings.patch(cache_dir=str(tmp_path)):
        [made] = WideChoice.of(config, problem, SM90).artifacts(SM90)
    assert made.threads == shape.threads
    assert made.shared_bytes == made.predicted_bytes
    assert (made.stack_bytes, made.spilled_share) == (0, 0)
    assert made.registers is not None
    assert made.registers <= shape.most_registers
    products = shape.tiles * shape.depth(weights_of(problem)) // 16
    assert made.code.count(f"HGMMA.64x{shape.rows}x16.F32") == products, "products are not put in sequence by the compiler"
    assert INSTRUCTIONS[problem.dtype].split(".")[0] in made.code
    assert read_early(made.code) == []
    assert "MEMBAR" not in made.code, "the blocks of a cluster wait for each other at barriers alone"
    assert len(made.code.splitlines()) < MOST_LINES, "what is executed once has to be read from memory"
