"""Tensor descriptors made on the host: how Triton's versions take them, and each address encoded once.

A kernel has a descriptor by value (a ``__grid_constant__`` parameter), so a launch copies it: CUDA graphs keep their own copy, and
one descriptor serves any number of launches.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...problem import Layout
from ...problem.layout import ALIGNED_BYTES

__all__ = ["Description", "describable", "describe", "encoder", "turned"]

MOST_KNOWN = 512
"""Addresses whose descriptors are kept; with more, all are forgotten and made anew when they are needed."""
PITCH_ELEMENTS = 16
"""A pitch of 16 elements of two bytes or more is a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines of a matrix that are contiguous: how many, how long, and how far apart."""

    count: int
    length: int
    pitch: int


def _lines(layout: Layout, *, by_columns: bool) -> _Lines:
    count, length = layout.size[-2:]
    pitch, step = layout.stride[-2:]
    if by_columns:
        count, length, pitch, step = length, count, step, pitch
    return _Lines(count, length, pitch if step == 1 or length == 1 else 0)


def turned(layout: Layout) -> bool:
    """Are neighbours in memory neighbours along a column, so that the block of a descriptor is the transposed one?"""
    return layout.stride[-1] != 1 and layout.stride[-2] == 1


def describable(layout: Layout) -> bool:
    """Can a tensor descriptor describe the matrix (CUDA driver API, cuTensorMapEncodeTiled: address and pitch at multiples of 16
    bytes, one dimension of stride 1)?"""
    lines, itemsize = _lines(layout, by_columns=turned(layout)), layout.dtype.itemsize
    apart = lines.count == 1 or (lines.pitch >= lines.length and lines.pitch * itemsize % ALIGNED_BYTES == 0)
    return 1 in layout.stride[-2:] and lines.pitch > 0 and apart and layout.offset == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A matrix as a descriptor has it: its contiguous lines, and the block that is moved at a time."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    block: tuple[int, int]

    @classmethod
    def of(cls, layout: Layout, block: tuple[int, int]) -> Description:
        """The description of a layout that ``configs.describable`` admits."""
        across = turned(layout)
        count, length = layout.size[-2:][:: -1 if across else 1]
        pitch = layout.stride[-1 if across else -2]
        if count == 1:
            # The pitch of a single line is never used, but has to be legal.
            pitch = -(-length // PITCH_ELEMENTS) * PITCH_ELEMENTS
        return cls(shape=(count, length), strides=(pitch, 1), block=block)


def describe(tensor: Tensor, description: Description) -> Any:
    """Triton's own descriptor object, which its launcher and its interpreter take."""
    kind = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return kind(tensor, list(description.shape), list(description.strides), list(description.block))


class _Base:
    """Stands for a tensor where only its address is asked."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@dataclass(slots=True, kw_only=True)
class _Described:
    """What ``make_tensordesc_arg`` of Triton's driver reads of a descriptor."""

    base: _Base
    shape: tuple[int, int]
    strides: tuple[int, int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


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
            described = _Described(base=_Base(address), shape=description.shape, strides=description.strides)
            found = known[address] = tuple(make(described, metadata, *more))
        return found

    return encoded
