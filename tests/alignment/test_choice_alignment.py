"""Which choices are legal for which alignment, over random layouts: no kernel is promised more of its operands than is true."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problem_strategies import problems

from gemmtune.backends.cublaslt.gemm import Gemm, Matrix, gemm_of
from gemmtune.backends.table import load
from gemmtune.backends.triton.build import KernelChoice
from gemmtune.backends.triton.configs import Config, geometry
from gemmtune.backends.triton.legality import Predicate
from gemmtune.backends.triton.padding import PaddedChoice
from gemmtune.backends.triton.spec import specialise
from gemmtune.backends.triton.swap import SwappedChoice, transposed
from gemmtune.device import preset
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Layout, Problem
from gemmtune.problem.layout import ALIGNED_BYTES
from gemmtune.settings import Settings
from gemmtune.toolchain.triton_kernels import Argument

QUICK = Settings(search="quick")
GPUS = ("sm75", "sm80", "sm90", "gfx942")

on_gpu = problems().map(lambda problem: dataclasses.replace(problem, device_type="cuda"))


def with_offsets(problem: Problem, offset: int) -> Problem:
    """The problem with a, b, out and inp moved by some elements."""
    moved = {
        name: dataclasses.replace(layout, offset=(layout.offset + offset) % (ALIGNED_BYTES // layout.dtype.itemsize))
        for name in ("a", "b", "out", "inp")
        if (layout := getattr(problem, name)) is not None
    }
    return dataclasses.replace(problem, **moved)


def full(problem: Problem, name: str) -> Layout:
    """An operand broadcast to (batch, rows, columns)."""
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    return getattr(problem, name).expanded({"a": (batch, m, k), "b": (batch, k, n)}.get(name, (batch, m, n)))


def value_of(argument: Argument, problem: Problem, config: Config) -> int | None:
    """What a launch gives for an argument of a kernel, an address as its distance from an aligned one; None for buffers."""
    match argument.source:
        case ("pointer", "a" | "b" | "out" | "inp" as name):
            layout = getattr(problem, name)
            return layout.offset * layout.dtype.itemsize
        case ("size", letter):
            return getattr(problem, letter)
        case ("stride", name, dim):
            layout = full(problem, name)
            # Along one element there is no step: any value is right, and 0 is what is given.
            return layout.stride[dim] if layout.size[dim] != 1 else 0
        case ("runtime", name):
            return getattr(geometry(problem, config), name)
    return None


def triton_choices(problem: Problem, arch: str) -> Iterator[tuple[Problem, KernelChoice]]:
    """The kernels that multiply, each with the problem that it is given: for a choice on copies, that of the copies, for one
    with swapped operands the transposed one."""
    for choice in load("triton").enumerate(problem, preset(arch), QUICK).choices:
        if isinstance(choice, PaddedChoice):
            yield choice.inner.problem, choice.inner
        elif isinstance(choice, SwappedChoice):
            yield transposed(problem), choice.inner
        else:
            assert isinstance(choice, KernelChoice)
            yield problem, choice


@pytest.mark.turn(0, 8)
@given(on_gpu, st.sampled_from(GPUS))
def test_triton_is_promised_no_divisor_that_a_size_stride_or_address_lacks(problem: Problem, arch: str) -> None:
    for given_problem, choice in triton_choices(problem, arch):
        assert given_problem == choice.problem
        for argument in choice.source.arguments:
            value = value_of(argument, given_problem, choice.config)
            assert value is None or value % argument.divisor == 0, (choice.name, argument, value)


@pytest.mark.turn(2, 8)
@given(on_gpu)
def test_triton_is_promised_nothing_of_operands_that_are_copied_first(problem: Problem) -> None:
    for choice in load("triton").enumerate(problem, preset("sm90"), QUICK).choices:
        if isinstance(choice, PaddedChoice):
            for argument in choice.copying.source.arguments:
                source = {f"{copy.letter}_from" for copy in choice.copies}
                assert argument.name not in source or argument.divisor == 1
            for copy in choice.copies:
                assert copy.target.offset == 0
                assert all(s in (0, 1) or s * copy.target.dtype.itemsize % ALIGNED_BYTES == 0 for s in copy.target.stride)


@given(on_gpu, st.sampled_from(GPUS), st.sampled_from([16, 32, 64]))
def test_the_width_of_an_access_is_never_above_the_alignment(problem: Problem, arch: str, block: int) -> None:
    config = Config(block_m=block, block_n=block, block_k=block, stages=2, warps=4)
    predicate = Predicate(problem, preset(arch))
    spec = specialise(problem, config)
    for name, operand, staged in zip("ab", (spec.a, spec.b), predicate.staging(config), strict=True):
        layout, itemsize = full(problem, name), problem.dtype.itemsize
        width = staged.width // itemsize
        assert itemsize <= staged.width <= ALIGNED_BYTES
        dim = operand.contiguous_dim
        if dim is None:
            assert width == 1
            continue
        for row in corners(layout, dim):
            assert (layout.offset + row) % width == 0
        # A vector is inside of the mask as a whole, or outside of it.
        masked = dim == (1 if name == "a" else 2) or problem.k % block != 0
        assert not masked or layout.size[dim] % width == 0
        plain = getattr(problem, name)
        assert not masked or 1 in plain.size or width <= plain.alignment


def corners(layout: Layout, contiguous: int) -> Iterator[int]:
    """Where some vectors' rows begin, in elements from the operand's first one."""
    for place in itertools.product(*(range(1) if i == contiguous else range(min(n, 4)) for i, n in enumerate(layout.size))):
        yield sum(p * s for p, s in zip(place, layout.stride, strict=True))


@pytest.mark.turn(1, 8)
@given(on_gpu, st.sampled_from(["sm80", "sm90"]))
def test_stages_are_offered_only_where_an_operand_can_be_copied_asynchronously(problem: Problem, arch: str) -> None:
    for given_problem, choice in triton_choices(problem, arch):
        if choice.config.stages > 1:
            widths = [staged.width for staged in Predicate(given_problem, preset(arch)).staging(choice.config)]
            assert max(widths) >= 4, "cp.async copies 4 bytes or more"


@given(on_gpu, st.integers(1, 7))
def test_unaligned_addresses_make_nothing_legal_and_no_access_wider(problem: Problem, offset: int) -> None:
    aligned, moved = (
        dataclasses.replace(problem, a=dataclasses.replace(problem.a, offset=at), b=dataclasses.replace(problem.b, offset=at))
        for at in (0, offset)
    )
    one, other = Predicate(aligned, preset("sm90")), Predicate(moved, preset("sm90"))
    for block_m, block_n, stages in itertools.product((16, 64), (16, 64), (1, 3)):
        config = Config(block_m=block_m, block_n=block_n, block_k=64, stages=stages, warps=4)
        assert one.check(config) is None or other.check(config) is not None
        assert all(x.width >= y.width for x, y in zip(one.staging(config), other.staging(config), strict=True))


@pytest.mark.turn(3, 8)
@given(problems(), st.integers(1, 7), st.sampled_from(["avx512", "avx2", "portable"]))
def test_cpp_serves_every_address_alike(problem: Problem, offset: int, arch: str) -> None:
    here, moved = (
        load("cpp").enumerate(p, preset(arch), Settings(search="exhaustive")) for p in (problem, with_offsets(problem, offset))
    )
    assert [c.name for c in here.choices] == [c.name for c in moved.choices]
    assert [c.compile_key for c in here.choices] == [c.compile_key for c in moved.choices]


@given(problems(), st.integers(1, 7))
def test_aten_serves_every_address_alike(problem: Problem, offset: int) -> None:
    here, moved = (load("aten").enumerate(p, preset("avx512"), QUICK) for p in (problem, with_offsets(problem, offset)))
    assert [c.name for c in here.choices] == [c.name for c in moved.choices]
    assert any(c.baseline for c in here.choices)


@given(on_gpu)
def test_cublaslt_is_told_the_memory_as_it_is(problem: Problem) -> None:
    gemm = gemm_or_reason(problem)
    if isinstance(gemm, str):
        assert "neither row- nor column-major" in gemm or "the added operand" in gemm
        return
    left, right = ("b", "a") if gemm.swapped else ("a", "b")
    for name, matrix in ((left, gemm.left), (right, gemm.right), ("out", gemm.d)):
        layout = getattr(problem, name)
        seen = layout.transposed if gemm.swapped else layout
        bytes_off = layout.offset * layout.dtype.itemsize
        assert bytes_off % matrix.alignment_bytes == 0
        assert matrix.alignment_bytes == ALIGNED_BYTES or bytes_off % (2 * matrix.alignment_bytes) != 0
        for place, address in places(seen):
            assert address == column_major(matrix, place, turned=matrix.transposed and name != "out")


def gemm_or_reason(problem: Problem) -> Gemm | str:
    """What cuBLASLt is asked to do, or why it is not asked."""
    try:
        return gemm_of(problem)
    except InvalidProblemError as error:
        return str(error)


def places(layout: Layout) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Some elements as (batch, row, column) with their distance from the first one."""
    shape, stride = ((1, *layout.size), (0, *layout.stride)) if len(layout.size) == 2 else (layout.size, layout.stride)
    for place in itertools.product(*(sorted({0, 1, n - 1} & set(range(n))) for n in shape)):
        yield place, sum(p * s for p, s in zip(place, stride, strict=True))


def column_major(matrix: Matrix, place: tuple[int, int, int], *, turned: bool) -> int:
    """Where cuBLASLt reads (or writes) op(matrix)[row, column]."""
    batch, row, col = place
    row, col = (col, row) if turned else (row, col)
    assert row < matrix.rows
    assert col < matrix.cols
    return batch * matrix.batch_stride + row + col * matrix.ld


@pytest.mark.parametrize("offset", range(9))
def test_the_offset_decides_who_may_copy_asynchronously(offset: int) -> None:
    """16-bit operands, both shifted: at odd offsets an access has 2 bytes, too few for an asynchronous copy."""
    a = Layout.contiguous((64, 64), torch.float16)
    problem = Problem(
        op="mm", device_type="cuda", a=dataclasses.replace(a, offset=offset % 8), b=dataclasses.replace(a, offset=offset % 8), out=a
    )
    config = Config(block_m=16, block_n=16, block_k=32, stages=3, warps=1)
    predicate = Predicate(problem, preset("sm80"))
    widths = {staged.width for staged in predicate.staging(config)}
    assert widths == {{0: 16, 4: 8, 2: 4, 6: 4}.get(offset % 8, 2)}
    reason = predicate.check(config)
    assert (reason is None) == (offset % 2 == 0)
    assert reason is None or "neither operand can be copied asynchronously" in reason
