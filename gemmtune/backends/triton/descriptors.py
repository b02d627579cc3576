"""Tensor descriptors made on the host: how Triton's versions take them, and each address encoded once.

A kernel has a descriptor by value (a ``__grid_constant__`` parameter), so a launch copies it: CUDA graphs keep their own copy, and
one descriptor serves any number of launches.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...problem import Layout
from ...problem.layout import ALIGNED_BYTES
from ...toolchain.record import MAP_BYTES

MOST_KNOWN = 512
"""Addresses whose descriptors are kept; with more, all are forgotten and made anew when they are needed."""
PITCH_ELEMENTS = 16
"""A pitch of 16 elements of two bytes or more is a multiple of 16 bytes."""


def turned(layout: Layout) -> bool:
    """Are neighbours in memory neighbours along a column, so that the block of a descriptor is the transposed one?"""
    return layout.stride[-1] != 1 and layout.stride[-2] == 1


def describable(layout: Layout) -> bool:
    """Can a tensor descriptor describe the matrix (CUDA driver API, cuTensorMapEncodeTiled: address and pitch at multiples of 16
    bytes, one dimension of stride 1)?"""
    count, length, pitch = _lines(layout)
    apart = count == 1 or (pitch >= length and pitch * layout.dtype.itemsize % ALIGNED_BYTES == 0)
    return 1 in layout.stride[-2:] and pitch > 0 and apart and layout.offset == 0


def stacked(layout: Layout) -> Layout | None:
    """The matrices of a batch as one matrix, below each other or, where they are turned, beside each other; None where there is
    a gap between them."""
    (count, rows, cols), (between, row, col) = layout.size, layout.stride
    dense = count == 1 or between == (col * cols if turned(layout) else row * rows)
    size, stride = ((rows, count * cols) if turned(layout) else (count * rows, cols)), (row, col)
    return Layout(size=size, stride=stride, dtype=layout.dtype, offset=layout.offset) if dense else None


def _lines(layout: Layout) -> tuple[int, int, int]:
    """The lines of a matrix whose elements are neighbours: how many, how long, and how far apart."""
    (count, length), (pitch, _) = (pair[-2:][:: -1 if turned(layout) else 1] for pair in (layout.size, layout.stride))
    return count, length, pitch


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A matrix as a descriptor has it: its contiguous lines, and the block that is moved at a time."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]

    @classmethod
    def of(cls, layout: Layout, block: tuple[int, int]) -> Description:
        """The description of a layout that ``configs.describable`` admits."""
        whole = layout if len(layout.size) == 2 else stacked(layout)
        assert whole is not None
        count, length, pitch = _lines(whole)
        if count == 1:
            # The pitch of a single line is never used, but has to be legal.
            pitch = -(-length // PITCH_ELEMENTS) * PITCH_ELEMENTS
        return cls(shape=(count, length), strides=(pitch, 1), block=block)


def describe(tensor: Tensor, description: Description) -> Any:
    """Triton's own descriptor object, which its launcher and its interpreter take."""
    kind = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return kind(tensor, list(description.shape), list(description.strides), list(description.block))


class Address:
    """Stands for a tensor where only its address and its dtype are asked."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype | None = None) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """The address."""
        return self._address


@dataclass(slots=True, kw_only=True)
class _Described:
    """What ``make_tensordesc_arg`` of Triton's driver reads of a descriptor."""

    base: Address
    shape: tuple[int, int]
    strides: tuple[int, int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def encoded_bytes(encoded: Any) -> bytes:
    """The CUtensorMap in an object of Triton's driver, whose last member it is."""
    return ctypes.string_at(id(encoded) + type(encoded).__basicsize__ - MAP_BYTES, MAP_BYTES)


def encoder(description: Description, metadata: Any) -> Callable[[int], Sequence[Any]]:
    """address → the kernel's arguments of one descriptor: the encoded one, two sizes and two strides. ``metadata`` is Triton's for
    this argument (``tensordesc_meta`` of the compiled kernel)."""
    make = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
    more = (None,) * (len(inspect.signature(make).parameters) - 2)
    known: dict[int, Sequence[Any]] = {}

    def encoded(address: int) -> Sequence[Any]:
        found = known.get(address)
        if found is None:
            if len(known) >= MOST_KNOWN:
                known.clear()
            described = _Described(base=Address(address), shape=description.shape, strides=description.strides)
            found = known[address] = tuple(make(described, metadata, *more))
        return found

    return encoded
