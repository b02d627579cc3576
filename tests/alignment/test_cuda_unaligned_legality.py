"""What the kernel for unaligned lines is legal for, and whether the compiler's figures are the predicted ones."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
from sass import read_early

from gemmtune import settings
from gemmtune.backends.cuda.unaligned.build import UnalignedChoice
from gemmtune.backends.cuda.unaligned.configs import SHAPES, Config, Shape
from gemmtune.backends.cuda.unaligned.launch import launch_of
from gemmtune.backends.cuda.unaligned.legality import aligned, by_k, check_config, check_problem, copy_bytes, grid_of
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.toolchain.compiled import find_cuobjdump
from gemmtune.toolchain.nvcc import find_compiler

SM90 = preset("sm90")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SMALL, CLUSTER = Shape(rows=64, cols=64), Shape(rows=128, cols=128, cluster=2)


def mm(m: int = 500, n: int = 501, k: int = 499, dtype: torch.dtype = BF16, layout: str = "nt") -> Problem:
    return Problem.mm(m, n, k, dtype=dtype, layout=layout, device_type="cuda")


def moved(problem: Problem, offset: int) -> Problem:
    """The same with a that many elements after an address of 16 bytes."""
    return dataclasses.replace(problem, a=dataclasses.replace(problem.a, offset=offset))


def strided(problem: Problem, stride: tuple[int, int]) -> Problem:
    return dataclasses.replace(problem, a=dataclasses.replace(problem.a, stride=stride))


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
        (mm(dtype=F32), "sm90", "a is float32, expected bfloat16 or float16"),
        (mm(k=0), "sm90", "the product is empty: nothing is launched"),
        (mm(k=7), "sm90", "K is 7, at least 8 are needed"),
        (
            mm(64, 64, 64),
            "sm90",
            "rows and columns of both operands are aligned to 16 bytes: other kernels copy them as they are",
        ),
        (Problem.bmm(3, 65, 67, 99, device_type="cuda"), "sm90", "a batch of 3 products: this kernel has one"),
        (
            strided(mm(), (998, 2)),
            "sm90",
            "a has strides (998, 2): rows or columns that are contiguous, and do not overlap, are copied",
        ),
        (
            strided(mm(), (498, 1)),
            "sm90",
            "a has strides (498, 1): rows or columns that are contiguous, and do not overlap, are copied",
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


@pytest.mark.parametrize(
    "problem",
    [
        mm(), mm(layout="nn"), mm(layout="tn"), mm(layout="tt"), mm(k=9), mm(1, 3, 9), moved(mm(64, 64, 64), 1),
        Problem.bmm(1, 65, 67, 99, device_type="cuda"),
    ],
)  # fmt: skip
def test_what_it_serves(problem: Problem) -> None:
    assert check_problem(problem, SM90) is None


def test_an_epilogue_in_float64_is_refused() -> None:
    wide = trace(lambda acc, x: acc * x, torch.float32, [torch.empty(500, 501, dtype=F64)])
    reason = check_problem(dataclasses.replace(mm(), epilogue=wide), SM90)
    assert reason == "operand 0 of the epilogue is float64, expected one of bfloat16, float16, float32"


@pytest.mark.parametrize(
    ("stride", "offset", "along_k", "is_aligned"),
    [
        ((64, 1), 0, True, True),
        ((65, 1), 0, True, False),
        ((64, 1), 3, True, False),
        ((1, 128), 0, False, True),
        ((1, 129), 0, False, False),
        ((0, 1), 0, None, False),
        ((2, 128), 0, None, True),
    ],
)
def test_the_contiguous_dimension_and_the_alignment_of_an_operand(
    stride: tuple[int, int], offset: int, along_k: bool | None, is_aligned: bool
) -> None:
    operand = Layout(size=(128, 64), stride=stride, dtype=BF16, offset=offset)
    assert by_k(operand) is along_k
    if along_k is not None:
        assert aligned(operand) is is_aligned


def test_a_copy_has_lines_of_whole_lines_of_l2() -> None:
    assert copy_bytes(Layout.contiguous((501, 499), BF16)) == 501 * 512 * 2
    assert copy_bytes(Layout.contiguous((499, 501), BF16).transposed) == 499 * 512 * 2


def test_tiles_are_those_of_whole_clusters_and_of_the_orientation() -> None:
    assert grid_of(mm(129, 257), Config(shape=CLUSTER)) == (2, 4)
    assert grid_of(mm(129, 257), Config(shape=CLUSTER, swapped=True)) == (3, 2)
    assert grid_of(mm(129, 257), Config(shape=SMALL)) == (3, 5)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (
            mm(500, 501, 512, layout="nn"),
            Config(shape=SMALL),
            "the operand that would be shifted is aligned, the other is not",
        ),
        (mm(500, 100), Config(shape=CLUSTER), "a cluster has 2 tiles beside each other, the result 1"),
        (
            mm(),
            Config(shape=Shape(rows=64, cols=16, cluster=16)),
            "a cluster has 16 blocks, at most 8 can be relied on",
        ),
        (
            mm(64, 2**21 + 1, 511),
            Config(shape=SMALL),
            "an aligned copy has 2147484672 bytes, at most 1073741824",
        ),
        (
            mm(2**24, 2**24 + 1, 9, layout="tn"),
            Config(shape=SMALL, swapped=True),
            "68719738880 tiles, at most 1073741824 fit a grid",
        ),
    ],
)
def test_configs_that_are_not_legal(problem: Problem, config: Config, reason: str) -> None:
    assert check_config(problem, SM90, config) == reason


def test_the_operand_that_is_not_aligned_is_the_one_that_is_shifted() -> None:
    problem = mm(500, 501, 512, layout="nn")
    assert check_config(problem, SM90, Config(shape=SMALL, swapped=True)) is None
    assert launch_of(Config(shape=SMALL, swapped=True), problem, 0).pads == 0
    assert [launch_of(Config(shape=SMALL, swapped=swapped), mm(), 0).pads for swapped in (False, True)] == [1, 1]


def test_blocks_have_room_on_a_multiprocessor() -> None:
    for one in SHAPES:
        for p_by_k in (False, True):
            assert one.stages(p_by_k=p_by_k) >= 3
            assert one.shared_bytes(p_by_k=p_by_k) + 1024 <= SM90.smem_per_sm_bytes
    small = dataclasses.replace(SM90, smem_per_block_bytes=64 * 1024)
    assert check_config(mm(), small, Config(shape=SMALL)) == "takes 139392 bytes of shared memory, a block has 65536"


@pytest.mark.skipif(not has_nvcc() or find_cuobjdump() is None, reason="needs nvcc and cuobjdump")
@pytest.mark.parametrize(("layout", "swapped"), [("nt", False), ("tn", False), ("nt", True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_compiler_needs_what_was_predicted(shape: Shape, layout: str, swapped: bool, tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path)):
        choice = UnalignedChoice.of(Config(shape=shape, swapped=swapped), mm(layout=layout), SM90)
        [made] = choice.artifacts(SM90)
    assert (made.threads, made.shared_bytes) == (shape.threads, shape.shared_bytes(p_by_k=layout == "nt"))
    assert made.shared_bytes == made.predicted_bytes
    assert made.stack_bytes == 0
    assert made.registers is not None
    assert made.registers * made.threads <= SM90.registers_per_sm
    assert f"HGMMA.64x{shape.cols}x16.F32.BF16" in made.code
    assert ("UTMALDG.2D.MULTICAST" if shape.cluster > 1 else "UTMALDG.2D") in made.code
    assert read_early(made.code) == []


@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
def test_the_workspace_is_the_copy(tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path)):
        _, library = UnalignedChoice.of(Config(shape=SMALL), mm(), SM90).open()
    for problem, swapped, expected in (
        (mm(), False, 501 * 512 * 2),
        (mm(), True, 500 * 512 * 2),
        (mm(504, layout="tt"), True, 0),
    ):
        launch = launch_of(Config(shape=SMALL, swapped=swapped), problem, 0)
        assert library.workspace_bytes(ctypes.addressof(launch)) == expected
