"""Which problems and configs the cluster kernel is legal for, and whether the compiler's figures are the predicted ones."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
from sass import read_early

from gemmtune import settings
from gemmtune.backends.cuda.cluster.build import ClusterChoice
from gemmtune.backends.cuda.cluster.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.cluster.launch import launch_of
from gemmtune.backends.cuda.cluster.legality import by_k, check_config, check_problem, spreads_of, tiles_of
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.toolchain.compiled import find_cuobjdump
from gemmtune.toolchain.nvcc import find_compiler

SM90 = preset("sm90")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def mm(m: int = 128, n: int = 128, k: int = 8192, dtype: torch.dtype = BF16, layout: str = "nt") -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def shape(text: str) -> Shape:
    return next(shape for shape in SHAPES if str(shape) == text)


def has_nvcc() -> bool:
    try:
        find_compiler()
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize(
    ("problem", "arch", "reason"),
    [
        (mm(), "sm80", "works on CUDA devices of compute capability 9.0, not on sm80"),
        (mm(), "sm100", "works on CUDA devices of compute capability 9.0, not on sm100"),
        (mm(dtype=F32), "sm90", "a is float32, expected bfloat16 or float16"),
        (mm(k=0), "sm90", "the product is empty: nothing is launched"),
        (mm(k=8196), "sm90", "a has strides (8196, 1) and offset 0: TMA copies rows or columns that are aligned to 16 bytes"),
        (
            mm(n=100, layout="nn"),
            "sm90",
            "the transpose of b has strides (1, 100) and offset 0: TMA copies rows or columns that are aligned to 16 bytes",
        ),
        (
            Problem.int_mm(128, 128, 8192, device_type="cuda"),
            "sm90",
            "int_mm is not an operation of this backend, which has mm, addmm, bmm, baddbmm",
        ),
    ],
)
def test_what_the_kernel_does_not_serve(problem: Problem, arch: str, reason: str) -> None:
    assert check_problem(problem, preset(arch)) == reason


@pytest.mark.parametrize("problem", [mm(m=1), mm(m=13, n=100, k=8200), mm(layout="tn"), mm(layout="tt"), mm(layout="nn")])
def test_what_it_serves(problem: Problem) -> None:
    assert check_problem(problem, SM90) is None


def test_an_offset_and_an_epilogue_in_float64_are_refused() -> None:
    moved = dataclasses.replace(mm(), a=dataclasses.replace(mm().a, offset=4))
    assert "offset 4" in str(check_problem(moved, SM90))
    wide = trace(lambda acc, x: acc * x, torch.float32, [torch.empty(128, 128, dtype=F64)])
    reason = check_problem(dataclasses.replace(mm(), epilogue=wide, out=Layout.contiguous((128, 128), F64)), SM90)
    assert reason == "the result is float64, expected one of bfloat16, float16, float32"


@pytest.mark.parametrize(
    ("stride", "expected"),
    [((64, 1), True), ((72, 1), True), ((1, 128), False), ((60, 1), None), ((32, 1), None), ((0, 1), None), ((2, 128), None)],
)
def test_the_contiguous_dimension_of_an_operand(stride: tuple[int, int], expected: bool | None) -> None:
    assert by_k(Layout(size=(128, 64), stride=stride, dtype=BF16)) is expected


def test_tiles_are_those_of_the_orientation_and_of_whole_clusters() -> None:
    problem, square = mm(16, 1000), Config(shape=shape("64x64x64_s6_k2_2x2"))
    assert [spreads_of(mm(m, n), square) for m, n in ((65, 65), (128, 129), (129, 257))] == [1, 2, 6]
    assert [tiles_of(mm(m, n), square) for m, n in ((65, 65), (128, 129), (129, 257))] == [4, 8, 24]
    few = shape("64x16x128_s5_k2")
    assert tiles_of(problem, Config(shape=few)) == 63
    assert tiles_of(problem, Config(shape=few, swapped=True)) == 16
    assert tiles_of(Problem.bmm(3, 16, 1000, 64, device_type="cuda"), Config(shape=few, swapped=True)) == 48


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (mm(), Config(shape=SHAPES[0], groups=257), "257 clusters share a tile, at most 256 can"),
        (mm(k=512), Config(shape=shape("64x64x64_s6_k8"), groups=2), "K has 8 steps, too few for 16 parts"),
        (
            mm(layout="nn"),
            Config(shape=shape("64x96x64_s10_k4_2x1")),
            "an operand whose lines run across K is copied in lines of 64, and a tile has 96 columns",
        ),
        (mm(2**22, 64, 512), Config(shape=SHAPES[0]), "65536 tiles, at most 32768 fit a grid"),
        (
            mm(2**20, 64, 512),
            Config(shape=SHAPES[0], groups=2),
            "536870912 bytes of sums in memory, at most 268435456",
        ),
        (
            mm(2**20 - 64, 64, 512),
            Config(shape=shape("128x64x64_s8_k2_1x2")),
            "a cluster has 1x2 tiles, the result 8192x1",
        ),
        (mm(64, 512), Config(shape=shape("64x64x64_s6_k2_2x2")), "a cluster has 2x2 tiles, the result 1x8"),
        (mm(), Config(shape=shape("128x64x64_s8_k1_2x2"), groups=513), "513 clusters share a tile, at most 512 can"),
        (
            mm(512, 512),
            Config(shape=Shape(rows=64, cols=64, depth=64, stages=6, blocks=4, spread_rows=2, spread_cols=2)),
            "a cluster has 16 blocks, at most 8 can be relied on",
        ),
        (
            mm(512, 512),
            Config(shape=Shape(rows=64, cols=16, depth=128, stages=4, spread_rows=4)),
            "4 blocks copy 16 lines for each other, in parts that have to be multiples of 8",
        ),
        (
            mm(512, 512, layout="tn"),
            Config(shape=Shape(rows=64, cols=64, depth=16, stages=4, spread_cols=4)),
            "4 blocks copy 16 lines for each other, in parts that have to be multiples of 8",
        ),
    ],
)
def test_configs_that_are_not_legal(problem: Problem, config: Config, reason: str) -> None:
    assert check_config(problem, SM90, config) == reason


def test_a_second_block_has_room_beside_one_with_half_the_memory() -> None:
    alone = [str(one) for one in SHAPES if 2 * (one.shared_bytes + 1024) > SM90.smem_per_sm_bytes]
    assert alone == [str(one) for one in SHAPES if one.resident == 1]
    assert alone == [
        "64x64x64_s12_k2",
        "64x64x128_s6_k2_2x2",
        "64x96x64_s10_k4_2x1",
        "128x64x64_s8_k1_2x2",
        "128x64x64_s8_k2_1x2",
    ]
    assert [one.ahead for one in SHAPES if one.resident == 1] == [6, 3, 5, 4, 4]
    assert all(one.ahead == one.stages for one in SHAPES if one.resident == 2)
    small = dataclasses.replace(SM90, smem_per_block_bytes=64 * 1024)
    assert check_config(mm(), small, Config(shape=SHAPES[0])) == "takes 110704 bytes of shared memory, a block has 65536"


@pytest.mark.skipif(not has_nvcc() or find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("64x64x64_s12_k2", "tn"),
        ("64x64x64_s6_k8", "nt"),
        ("128x16x64_s6_k2", "nt"),
        ("128x32x64_s5_k2", "nt"),
        ("64x64x128_s6_k2_2x2", "nt"),
        ("64x64x128_s6_k2_2x2", "tn"),
        ("128x64x64_s8_k1_2x2", "nt"),
        ("128x64x64_s8_k1_2x2", "tn"),
        ("64x64x64_s6_k2_2x2", "tn"),
        ("128x64x64_s8_k2_1x2", "nn"),
        ("64x96x64_s10_k4_2x1", "nt"),
        ("64x16x128_s5_k2", "nt"),
    ],
)
def test_the_compiler_needs_what_was_predicted(text: str, layout: str, tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path)):
        choice = ClusterChoice.of(Config(shape=shape(text)), mm(layout=layout), SM90)
        [made] = choice.artifacts(SM90)
    one = choice.config.shape
    assert (made.threads, made.shared_bytes) == (one.threads, one.shared_bytes) == (made.threads, made.predicted_bytes)
    assert made.stack_bytes == 0
    assert made.registers is not None
    assert made.registers * made.threads * one.resident <= SM90.registers_per_sm
    assert f"HGMMA.64x{one.cols}x16.F32.BF16" in made.code
    assert ("UTMALDG.3D.MULTICAST" if one.spread > 1 else "UTMALDG.3D") in made.code
    assert read_early(made.code) == []


@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
def test_the_memory_for_sums_is_that_of_the_tiles_of_whole_clusters(tmp_path: Path) -> None:
    problem, config = mm(129, 257), Config(shape=shape("64x64x64_s6_k2_2x2"), groups=5)
    with settings.patch(cache_dir=str(tmp_path)):
        choice = ClusterChoice.of(config, problem, SM90)
        _, library = choice.open()
    tiles, warps = tiles_of(problem, config), 4
    assert tiles == 24
    counters = -(-tiles * config.shape.blocks * (8 + 4 * config.groups * warps) // 128) * 128
    for told, expected in ((config, counters + tiles * config.groups * 64 * 64 * 4), (Config(shape=config.shape), 0)):
        launch = launch_of(told, problem, 0)
        assert library.workspace_bytes(ctypes.addressof(launch)) == expected
