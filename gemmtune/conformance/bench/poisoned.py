"""Memory in which it shows what a GEMM wrote and what it did not."""

from __future__ import annotations

import torch

from ...numerics.guards import Guards
from ...numerics.operands import GUARD_BYTES, allocate, poison
from ...problem import Layout

__all__ = ["guarded_out", "poison_free_memory"]

GUARD_TILE = 256
"""Rows and columns of out that the guard band has room for on each side: the largest tile that is in use."""
MOST_GUARD_BYTES = 2**24
SMALL_BYTES = 2**17
"""Up to this size the C library takes memory from its heap; beyond, only once it has learnt to by such memory being freed."""
COPIES = {"small": 8, "large": 4}
"""Places that are poisoned, so that a GEMM may allocate scratch memory before its result."""
MOST_POISONED_BYTES = 2**28
ALWAYS_FRESH_BYTES = {"cpu": 2**25, "cuda": 2**32}
"""Results larger than this get memory that was never in use: glibc maps them anew, and GPU memory is dear."""


def guarded_out(layout: Layout, device: torch.device, payload: int) -> tuple[torch.Tensor, Guards]:
    """A poisoned tensor of that layout, and what watches everything around and between its elements."""
    row = max((*layout.stride[-2:], layout.size[-1]))
    room = min(GUARD_TILE * (row + 1) * layout.dtype.itemsize, MOST_GUARD_BYTES)
    out = allocate(layout, device, guard_bytes=max(room, GUARD_BYTES))
    poison(out, payload)
    return out, Guards(out)


def poison_free_memory(layout: Layout, device: torch.device, payload: int) -> torch.Tensor | None:
    """Leave poison in the free memory that an allocation of the layout's size gets next: what stays unwritten then shows.

    Neither allocator promises anything, but from 1 KB on nearly every result lands in poison. Returns what has to be kept alive
    until then: on a CPU it lies above the poisoned places, which the C library would give back to the system otherwise.
    """
    size = Layout.contiguous(layout.size, layout.dtype)
    size_bytes = size.span * layout.dtype.itemsize
    if not 0 < size_bytes <= ALWAYS_FRESH_BYTES["cpu" if device.type == "cpu" else "cuda"]:
        return None
    small = size_bytes <= SMALL_BYTES
    copies = max(2, min(COPIES["small" if small else "large"], MOST_POISONED_BYTES // size_bytes))
    kept: torch.Tensor | None = None
    for _ in range(1 if small or device.type != "cpu" else 2):
        places = [torch.empty(layout.size, dtype=layout.dtype, device=device) for _ in range(copies)]
        for place in places:
            poison(place, payload)
        kept = places[-1]
    return kept
