"""Layout: alignment, contiguity, broadcasting and span, against worked cases and brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Layout
from gemmtune.problem.layout import ALIGNED_BYTES

quick = hypothesis_settings(max_examples=300)


def layout(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float16, offset: int = 0) -> Layout:
    return Layout(size=size, stride=stride, dtype=dtype, offset=offset)


@pytest.mark.parametrize(
    ("size", "stride", "dtype", "offset", "expected"),
    [
        ((1, 2, 4), (0, 4, 1), torch.float16, 0, 4),
        ((1, 4, 2), (0, 1, 4), torch.float16, 0, 4),
        ((2, 4, 2), (23, 1, 4), torch.float16, 0, 1),
        ((1, 2, 4), (0, 4, 1), torch.float16, 6, 2),
        ((2, 2, 8), (32, 8, 1), torch.float16, 24, 8),
        ((2, 2, 8), (32, 8, 1), torch.float32, 24, 4),
        ((64, 64), (64, 1), torch.float64, 0, 2),
        ((64, 64), (64, 1), torch.bfloat16, 0, 8),
        ((64, 64), (128, 2), torch.float16, 0, 1),
        ((1, 8), (1, 1), torch.float16, 0, 1),
        ((8, 1), (1, 1), torch.float16, 0, 1),
        ((64, 8), (8, 1), torch.float16, 1, 1),
        ((64, 8), (0, 1), torch.float16, 0, 8),
        ((), (), torch.float16, 0, 1),
        ((64, 64), (64, 1), torch.int8, 0, 16),
        ((64, 64), (64, 1), torch.float8_e4m3fn, 8, 8),
        ((64, 64), (1, 64), torch.float8_e5m2, 4, 4),
        ((64, 34), (48, 1), torch.int8, 0, 2),
        ((64, 64), (65, 1), torch.int8, 0, 1),
        ((64, 64), (64, 1), torch.float32, 2, 2),
        ((64, 64), (66, 1), torch.float32, 0, 2),
        ((4, 64, 64), (4097, 64, 1), torch.bfloat16, 0, 1),
    ],
)
def test_worked_cases(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int, expected: int) -> None:
    assert layout(size, stride, dtype, offset).alignment == expected


def test_of_several_contiguous_dimensions_the_better_counts() -> None:
    assert layout((8, 1), (1, 8)).alignment == 8
    assert layout((1, 8, 6), (48, 1, 1)).alignment == layout((1, 6, 8), (48, 1, 1)).alignment


small = st.integers(0, 40) | st.sampled_from([8, 16, 24, 32, 64, 128])
dtypes = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    rank = draw(st.integers(1, 3))
    stride = draw(st.lists(small | st.just(1), min_size=rank, max_size=rank))
    size = draw(st.lists(small, min_size=rank, max_size=rank))
    return layout(tuple(size), tuple(stride), draw(dtypes), draw(st.integers(0, 15)))


@given(layouts())
@quick
def test_alignment_is_the_rule_by_brute_force(given_layout: Layout) -> None:
    widths = {1: (16, 8, 4, 2, 1), 2: (8, 4, 2, 1), 4: (4, 2, 1), 8: (2, 1)}[given_layout.dtype.itemsize]
    legal = [
        width
        for width, dim in itertools.product(widths, range(len(given_layout.size)))
        if given_layout.stride[dim] == 1
        and given_layout.size[dim] % width == 0
        and given_layout.offset % width == 0
        and all(s % width == 0 for i, s in enumerate(given_layout.stride) if i != dim)
    ]
    assert given_layout.alignment == max(legal, default=1)


@given(layouts())
@quick
def test_every_aligned_access_is_aligned_in_memory(given_layout: Layout) -> None:
    """What alignment is for: a vector of that many elements, begun at a multiple of it along the contiguous dimension."""
    width = given_layout.alignment
    if width == 1 or given_layout.numel == 0:
        return
    dim = next(
        d for d in given_layout.contiguous_dims if given_layout.size[d] % width == 0 and _others_divide(given_layout, d, width)
    )
    for position in itertools.product(*(range(min(n, 3)) for n in given_layout.size)):
        start = [p * width if i == dim else p for i, p in enumerate(position)]
        address = given_layout.offset + sum(p * s for p, s in zip(start, given_layout.stride, strict=True))
        assert address % width == 0


def _others_divide(given_layout: Layout, dim: int, width: int) -> bool:
    return all(s % width == 0 for i, s in enumerate(given_layout.stride) if i != dim)


@given(layouts())
@quick
def test_span_by_brute_force(given_layout: Layout) -> None:
    corners = itertools.product(*({0, n - 1} for n in given_layout.size))
    reached = [sum(p * s for p, s in zip(position, given_layout.stride, strict=True)) for position in corners]
    assert given_layout.span == (0 if given_layout.numel == 0 else max(reached) + 1)


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 40), dtypes)
@quick
def test_of_a_tensor(rank: int, m: int, n: int, offset: int, dtype: torch.dtype) -> None:
    shape = (3, m, n)[3 - rank :]
    buffer = torch.empty(300, dtype=dtype)
    assert buffer.data_ptr() % ALIGNED_BYTES == 0
    view = buffer[offset : offset + torch.Size(shape).numel()].view(shape)
    got = Layout.of(view)
    assert (got.size, got.stride, got.dtype) == (tuple(view.shape), view.stride(), dtype)
    assert got.offset == (offset % (ALIGNED_BYTES // dtype.itemsize) if view.numel() else 0)


@pytest.mark.parametrize("shape", [(), (5,), (4, 5), (2, 4, 5), (2, 0, 5), (0, 3), (1, 1)], ids=str)
def test_contiguous_is_torchs_layout(shape: tuple[int, ...]) -> None:
    expected = torch.empty(shape, dtype=torch.float32)
    assert Layout.contiguous(shape, torch.float32) == Layout.of(expected)
    if len(shape) >= 2:
        assert Layout.contiguous(shape, torch.float32).transposed == Layout.of(expected.mT)


@given(st.data())
@quick
def test_expanded_is_torchs_expand(data: st.DataObject) -> None:
    target = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple))
    rank = data.draw(st.integers(0, len(target)))
    source = tuple(data.draw(st.sampled_from([1, n])) for n in target[len(target) - rank :])
    x = torch.empty(source)
    expanded = Layout.of(x).expanded(target)
    assert expanded.size == target
    reference = x.expand(target)
    for n, got, expected in zip(target, expanded.stride, reference.stride(), strict=True):
        assert n == 1 or got == expected


@pytest.mark.parametrize(("source", "target"), [((3,), (4, 5)), ((4, 1, 5), (4, 5)), ((2, 5), (4, 5))])
def test_what_does_not_broadcast_is_refused(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(InvalidProblemError) as caught:
        Layout.contiguous(source, torch.float32).expanded(target)
    assert str(caught.value) == f"got an operand of shape {source}, expected one that broadcasts to {target}"


@pytest.mark.parametrize(
    ("stride", "row", "column"),
    [
        ((5, 1), True, False),
        ((1, 4), False, True),
        ((8, 1), True, False),
        ((10, 2), False, False),
        ((4, 1), False, False),  # each row begins at the last element of the one before
        ((1, 3), False, False),
        ((0, 1), False, False),
        ((1, 1), False, False),
    ],
    ids=str,
)
def test_row_and_column_major(stride: tuple[int, int], row: bool, column: bool) -> None:
    given_layout = layout((4, 5), stride)
    assert (given_layout.row_major, given_layout.column_major) == (row, column)


def test_a_single_row_is_row_major_whatever_its_row_stride() -> None:
    assert layout((1, 5), (1, 1)).row_major
    assert layout((5, 1), (1, 7)).column_major


def test_bad_layouts() -> None:
    with pytest.raises(InvalidProblemError, match=r"got 2 sizes \(4, 5\) and 1 strides \(5,\)"):
        layout((4, 5), (5,))
    with pytest.raises(InvalidProblemError, match="sizes, strides and offset must be 0 or more, got float16"):
        layout((4, 5), (-5, 1))


def test_text() -> None:
    assert str(layout((4, 5), (5, 1))) == "float16[4x5](5,1)"
    assert str(layout((), (), torch.float32)) == "float32[scalar]()"
    assert str(layout((4, 5), (5, 1), offset=3)) == "float16[4x5](5,1)+3"
