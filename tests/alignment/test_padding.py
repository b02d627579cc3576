"""When the Triton backend offers choices on aligned copies, and what those copies look like."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.backends.triton import BACKEND
from gemmtune.backends.triton.padding import MOST_EXTRA, padded_k, padded_problem
from gemmtune.device import preset
from gemmtune.problem import Layout, Problem
from gemmtune.problem.layout import ALIGNED_BYTES
from gemmtune.settings import Settings

SIZES = st.integers(16, 700)


def offered(problem: Problem, arch: str = "sm90") -> list[str]:
    return [c.name for c in BACKEND.enumerate(problem, preset(arch), Settings()).choices if c.name.endswith("_pad")]


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_aligned_operands_are_not_copied(layout: str):
    assert not offered(Problem.mm(512, 512, 512, layout=layout, device_type="cuda"))


@pytest.mark.parametrize(("shape", "layout"), [((512, 512, 511), "nt"), ((512, 511, 512), "nn"), ((511, 512, 512), "tn")])
def test_unaligned_rows_are_copied(shape: tuple[int, int, int], layout: str):
    assert offered(Problem.mm(*shape, layout=layout, device_type="cuda"))


def test_sizes_that_touch_no_row_start_need_no_copy():
    # M of a row-major a, and N of an N×K b, only count rows.
    assert not offered(Problem.mm(511, 509, 512, layout="nt", device_type="cuda"))


def test_a_misaligned_pointer_is_copied():
    a = Layout(size=(64, 64), stride=(64, 1), dtype=torch.float16, offset=1)
    b = Layout.contiguous((64, 64), torch.float16)
    problem = Problem(op="mm", a=a, b=b, out=b, device_type="cuda")
    padded = padded_problem(problem)
    assert padded is not None
    assert [copy.letter for copy in padded[1]] == ["a"]


def test_a_matrix_with_few_rows_is_read_once_and_not_worth_a_copy():
    assert not offered(Problem.mm(1, 512, 511, layout="nt", device_type="cuda"))


DTYPES = st.sampled_from([torch.float16, torch.float32, torch.float64])


@given(SIZES, SIZES, SIZES, st.sampled_from(["nn", "nt", "tn", "tt"]), DTYPES)
def test_the_padded_problem_is_aligned_and_of_the_same_meaning(m: int, n: int, k: int, layout: str, dtype: torch.dtype):
    problem = Problem.mm(m, n, k, layout=layout, dtype=dtype, device_type="cuda")
    padded = padded_problem(problem)
    if padded is None:
        assert all(x.alignment * dtype.itemsize >= ALIGNED_BYTES for x in (problem.a, problem.b))
        return
    inner, copies = padded
    assert (inner.m, inner.n, inner.out) == (m, n, problem.out)
    assert inner.k >= k
    for copy in copies:
        rows, cols = copy.block
        assert cols * dtype.itemsize % ALIGNED_BYTES == 0
        assert copy.target.span <= rows * cols == copy.elements
        tile_rows, tile_cols = copy.tile
        assert copy.programs * tile_rows * tile_cols >= rows * cols


@given(st.integers(1, 100_000))
def test_padding_along_k_is_cheap(k: int):
    assert padded_k(k) % 16 == 0
    assert k <= padded_k(k) <= max(k * (1 + MOST_EXTRA), k + 15)
