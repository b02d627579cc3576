"""Tensor descriptors made on the host for all supported Triton versions. Each address is encoded once.

A kernel receives a descriptor by value (a ``__grid_constant__`` parameter), and a launch copies it. CUDA graphs keep their own
copy, so one descriptor serves any number of launches.
"""

import ctypes
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...bounded import Bounded
from ...problem import Layout
from ...problem.layout import ALIGNED_BYTES
from ...toolchain.record import MAP_BYTES

MOST_KNOWN = 512
"""Addresses whose descriptors are cached; beyond this number the cache is emptied."""
PITCH_ELEMENTS = 16
"""Granularity of a single line's pitch: 16 elements of two bytes or more are a multiple of 16 bytes."""


def is_transposed(layout: Layout) -> bool:
    """Return True if the matrix is contiguous along a column, so that a descriptor's block is its transpose."""
    return layout.stride[-1] != 1 and layout.stride[-2] == 1


def describable(layout: Layout) -> bool:
    """Return True if address and pitch are multiples of 16 bytes and one stride is 1 (CUDA driver API, cuTensorMapEncodeTiled)."""
    count, length, pitch = _lines(layout)
    apart = count == 1 or (pitch >= length and pitch * layout.dtype.itemsize % ALIGNED_BYTES == 0)
    return 1 in layout.stride[-2:] and pitch > 0 and apart and layout.offset == 0


def stacked(layout: Layout) -> Layout | None:
    """Return the matrices of a batch stacked below, or if transposed next to, each other as one matrix; None if there are gaps."""
    (count, rows, cols), (between, row, col) = layout.size, layout.stride
    dense = count == 1 or between == (col * cols if is_transposed(layout) else row * rows)
    size, stride = ((rows, count * cols) if is_transposed(layout) else (count * rows, cols)), (row, col)
    return Layout(size=size, stride=stride, dtype=layout.dtype, offset=layout.offset) if dense else None


def _lines(layout: Layout) -> tuple[int, int, int]:
    """Return the contiguous lines of a matrix: (count, length, pitch)."""
    (count, length), (pitch, _) = (pair[-2:][:: -1 if is_transposed(layout) else 1] for pair in (layout.size, layout.stride))
    return count, length, pitch


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Matrix as a descriptor sees it: its contiguous lines, and the block that one copy moves."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]

    @classmethod
    def of(cls, layout: Layout, block: tuple[int, int]) -> "Description":
        """Return the description of a layout that ``describable`` accepts."""
        whole = layout if len(layout.size) == 2 else stacked(layout)
        assert whole is not None
        count, length, pitch = _lines(whole)
        if count == 1:
            # A single line's pitch is never used but must be legal.
            pitch = -(-length // PITCH_ELEMENTS) * PITCH_ELEMENTS
        return cls(shape=(count, length), strides=(pitch, 1), block=block)


def describe(tensor: Tensor, description: Description) -> Any:
    """Return Triton's own descriptor object, which its launcher and its interpreter take."""
    kind = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return kind(tensor, list(description.shape), list(description.strides), list(description.block))


class Address:
    """Substitute for a tensor of which only the address and dtype are needed."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype | None = None) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


@dataclass(slots=True, kw_only=True)
class _Described:
    """Attributes of a descriptor that ``make_tensordesc_arg`` of Triton's driver reads."""

    base: Address
    shape: tuple[int, int]
    strides: tuple[int, int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def encoded_bytes(encoded: Any) -> bytes:
    """Return the CUtensorMap inside an object of Triton's driver; it is the object's last member."""
    return ctypes.string_at(id(encoded) + type(encoded).__basicsize__ - MAP_BYTES, MAP_BYTES)


def encoder(description: Description, metadata: Any) -> Callable[[int], Sequence[Any]]:
    """Return a function from an address to one descriptor's kernel arguments: its encoding, two sizes and two strides.

    ``metadata`` is Triton's for this argument (``tensordesc_meta`` of the compiled kernel).
    """
    make = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
    more = (None,) * (len(inspect.signature(make).parameters) - 2)
    known = Bounded[int, Sequence[Any]](MOST_KNOWN)

    def encoded(address: int) -> Sequence[Any]:
        found = known.get(address)
        if found is None:
            described = _Described(base=Address(address), shape=description.shape, strides=description.strides)
            found = known[address] = tuple(make(described, metadata, *more))
        return found

    return encoded
