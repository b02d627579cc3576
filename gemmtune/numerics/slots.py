"""Copies of one operand that share buffers: each lies in gaps that the others leave.

A view such as ``h[:, -1]`` of (4, 4096, 512) has 2048 elements in a span of six million. A buffer for each copy would take
thousands of times the memory of its elements.
"""

import dataclasses
import math
from typing import Any

import torch

from ..problem import Layout, Problem
from .buffers import GUARD_BYTES, allocate, distinct, distinct_size, element_bits, flat, overlapping, placed
from .guards import Watch
from .operands import Operands

LEAST_SPAN_BYTES = 2**20
"""Span from which gaps count as large."""
LEAST_GAPS = 2
"""Span from which gaps count as large, in multiples of the elements."""


class Slots:
    """Tensors of one layout whose elements do not share memory, in as few buffers as the layout's gaps allow.

    They are for timing. The verifier compares the whole buffer of an operand before and after a call, and has a ``Stage``.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._count, self._pitch = slots_of(layout)
        self._whole: torch.Tensor | None = None
        self._used = 0

    def take(self) -> torch.Tensor:
        """Return the next tensor, uninitialised. Its address has the layout's alignment."""
        if self._whole is None:
            self._whole = allocate(self._layout, self._device, room=(self._count - 1) * self._pitch)
            self._used = 0
        x, place = self._whole, self._used
        self._used += 1
        if self._used == self._count:
            self._whole = None  # full: only its tensors keep it
        return x.as_strided(x.size(), x.stride(), x.storage_offset() + place * self._pitch)


def slots_of(layout: Layout) -> tuple[int, int]:
    """Return how many tensors of the layout fit into the gaps of one, and the elements from the start of each to the next.

    Addresses differ by multiples of GUARD_BYTES, so that every tensor has the alignment of the first.
    """
    if overlapping(layout):
        return 1, 0
    unit = GUARD_BYTES // layout.dtype.itemsize
    dims = sorted((s, n) for n, s in zip(layout.size, layout.stride, strict=True) if n > 1 and s > 0)
    best, extent = (1, 0), 1
    for i, (stride, size) in enumerate(dims):
        pitch = -(-extent // unit) * unit
        reach = (size - 1) * stride
        room = min(stride, dims[i + 1][0] - reach) if i + 1 < len(dims) else stride
        best = max(best, (room // pitch, pitch))
        extent += reach
    return best


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements of a tensor into one of the same layout, and no gaps."""
    if overlapping(Layout.of(source)):
        flat(target).copy_(flat(source))
    else:
        distinct(target).copy_(distinct(source))


def tight(layout: Layout) -> Layout:
    """Return the layout without its gaps if they are large, else the layout. The order of dimensions in memory stays."""
    elements = math.prod(distinct_size(layout))
    if layout.span * layout.dtype.itemsize < LEAST_SPAN_BYTES or layout.span < LEAST_GAPS * elements or overlapping(layout):
        return layout
    stride, extent = list(layout.stride), 1
    for dim in sorted(range(len(stride)), key=lambda dim: layout.stride[dim]):
        if layout.size[dim] > 1 and layout.stride[dim] > 0:
            stride[dim] = extent
            extent *= layout.size[dim]
    return dataclasses.replace(layout, stride=tuple(stride))


def tight_problem(problem: Problem) -> Problem:
    """Return the problem without large gaps in operands and result. Numbers for it need no more memory than their elements."""
    layouts: dict[str, Any] = {role: tight(layout) for role, layout in (*problem.operands, ("out", problem.out))}
    return dataclasses.replace(problem, **layouts)


class Stage:
    """A buffer for each operand with large gaps, which holds the elements of one call at a time and NaN between them.

    Operands of ``tight_problem`` are copied into it on the current stream, so after the kernels that read the previous ones.
    The copied operands stay as they are: references and later calls read them.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._held = {role: placed(layout, device, None) for role, layout in problem.operands if tight(layout) != layout}
        self._sources: dict[str, torch.Tensor] = {}
        self._clear()
        self._gaps = Watch(self._held)

    def place(self, operands: Operands) -> Operands:
        """Return the operands in the problem's layouts, valid until the next call of this method."""
        given = {role: getattr(operands, role) for role in self._held}
        self._sources = {role: x for role, x in given.items() if x.stride() != self._held[role].stride()}
        for role, source in self._sources.items():
            copy_elements(self._held[role], source)
        here: dict[str, Any] = {role: self._held[role] for role in self._sources}
        return dataclasses.replace(operands, **here)

    def of_its_own(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the operand that was placed last, in a buffer that no later call gets, or ``tensor`` if it is not on the stage."""
        if role not in self._sources:
            return tensor
        made = placed(Layout.of(tensor), tensor.device, None)
        copy_elements(made, tensor)
        return made

    def changed(self) -> dict[str, torch.Tensor]:
        """Return a boolean on the device for each operand placed last: True if one of its elements has changed."""
        held = {role: distinct(self._held[role]) for role in self._sources}
        return {role: (element_bits(held[role]) != element_bits(distinct(x))).any() for role, x in self._sources.items()}

    def gaps_changed(self) -> dict[str, torch.Tensor]:
        """Return a flag on the device for each buffer: True if memory around or between elements changed. The elements are lost."""
        self._clear()
        return dict(zip(self._gaps.names, self._gaps.changed(), strict=True))

    def _clear(self) -> None:
        for held in self._held.values():
            element_bits(distinct(held)).zero_()
