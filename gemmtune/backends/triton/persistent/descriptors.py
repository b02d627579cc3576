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

from ....problem import Layout
from ..launch import Launcher
from .configs import turned

__all__ = ["Description", "describe", "encoder", "takes_encoded"]

MOST_KNOWN = 512
"""Addresses whose descriptors are kept; with more, all are forgotten and made anew when they are needed."""
PITCH_ELEMENTS = 16
"""A pitch of 16 elements of two bytes or more is a multiple of 16 bytes."""


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


def takes_encoded(compiled: Any, call: Launcher) -> Launcher | None:
    """``call`` with the function below Triton's handling of descriptors, which takes them encoded; None where that is not known.

    Triton 3.6 has a function of its own for each signature, below a closure; 3.7 to 3.9 have one for all kernels.
    """
    if call.function is compiled.run:
        return None
    if call.packed:
        function = importlib.import_module("triton").runtime.driver.active.utils.launch
    elif inspect.isfunction(call.function):
        function = inspect.getclosurevars(call.function).nonlocals.get("launcher")
    else:
        function = None
    if function is None or not inspect.isbuiltin(function):
        return None
    return Launcher(function=function, grid=call.grid, middle=call.middle, packed=call.packed)


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
