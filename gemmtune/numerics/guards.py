"""Memory that shows which elements a GEMM wrote: poison, guard bands and checksums, on the device and without waiting."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..problem import Layout
from .block_sparse import parts
from .buffers import POISONS, allocate, distinct, element_bits, poison, storage_bits

GUARD_TILE = 256
"""Rows and columns of out that the guard band has room for on each side: the largest tile in use."""
MOST_GUARD_BYTES = 2**24
SMALL_BYTES = 2**17
"""Largest size that the C library always takes from its heap: larger ones only after it has freed as much."""
COPIES = {"small": 8, "large": 4}
"""Number of places that are poisoned, so that a GEMM may allocate scratch memory before its result."""
MOST_POISONED_BYTES = 2**28
ALWAYS_FRESH_BYTES = {"cpu": 2**25, "cuda": 2**32}
"""Size above which results get fresh memory: glibc maps it anew, and GPU memory is scarce."""
WEIGHT_PARTS = ("values", "row starts", "column indices")
"""Names of the three tensors of a block-sparse operand."""
COMPARED_ELEMENTS = 2**24
"""Elements of a buffer that are compared at a time."""
_ATEN = torch.ops.aten
_EMPTY = frozenset((_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided))
"""Functions of torch that allocate without writing."""
LANES = 251
"""Number of separate sums, by position modulo this prime, so that exchanged elements show."""


class Guards:
    """Watcher of everything in out's buffer that is not an element of out: guard bands and padding between rows."""

    def __init__(self, out: torch.Tensor) -> None:
        self._bits = storage_bits(out)
        self._first = out.storage_offset()
        self._span = Layout.of(out).span
        self._elements = None if out.numel() == self._span else element_bits(distinct(out))

    def broken(self, payload: int) -> torch.Tensor:
        """Return float64 [2]: a flag that a guard no longer holds ``payload``, and its position in the buffer."""
        if self._elements is not None:
            return self._broken_between(self._elements, payload)
        end = self._first + self._span
        changed = torch.cat([self._bits[: self._first], self._bits[end:]]) != payload
        position = changed.to(torch.uint8).argmax()
        position += (position >= self._first) * self._span
        return torch.stack([changed.any(), position]).double()

    def _broken_between(self, elements: torch.Tensor, payload: int) -> torch.Tensor:
        """Compare the whole buffer while the elements hold ``payload`` too: no mask as large as the buffer is needed."""
        kept = elements.clone()
        elements.fill_(payload)
        found = []
        for start in range(0, len(self._bits), COMPARED_ELEMENTS):
            changed = self._bits[start : start + COMPARED_ELEMENTS] != payload
            found.append(torch.stack([changed.any(), changed.view(torch.uint8).argmax() + start]).double())
        elements.copy_(kept)
        pieces = torch.stack(found)
        return pieces[pieces[:, 0].argmax()]

    def describe(self, position: int) -> str:
        """Describe ``position`` in the buffer relative to out."""
        distance = position - self._first
        if distance < 0:
            return f"wrote outside of out, {-distance} elements before its first"
        if distance >= self._span:
            return f"wrote outside of out, {distance - self._span + 1} elements after its last"
        return f"wrote into the padding of out, {distance} elements after its first"


class Checksum:
    """Sums over the words of a tensor's whole buffer, taken at construction."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._words = storage_bits(tensor, torch.int64 if tensor.untyped_storage().nbytes() % 8 == 0 else torch.uint8)
        self._sums = self._sum()

    def watches(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` lies in the buffer."""
        return tensor.untyped_storage().data_ptr() == self._words.untyped_storage().data_ptr()

    def changed(self) -> torch.Tensor:
        """Return a boolean on the device: True if the buffer's sums have changed."""
        return (self._sum() != self._sums).any()

    def _sum(self) -> torch.Tensor:
        whole = self._words.numel() // LANES * LANES
        lanes = self._words[:whole].view(-1, LANES).sum(dim=0, dtype=torch.int64)
        return torch.cat([lanes, self._words[whole:].to(torch.int64)])


class Watch:
    """Inputs that a call must not change, by name. Memory that is already watched is not watched twice."""

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self._checksums: dict[str, Checksum] = {}
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Record the checksum of ``tensor``'s memory in its current state."""
        for number, part in enumerate(parts(tensor)):
            if part.numel() and not any(checksum.watches(part) for checksum in self._checksums.values()):
                self._checksums[f"{name} ({WEIGHT_PARTS[number]})" if tensor.layout == torch.sparse_bsr else name] = Checksum(part)

    def holder(self, tensor: torch.Tensor) -> str:
        """Return the name of the watched tensor whose buffer ``tensor`` lies in, or an empty text."""
        names = (name for name, checksum in self._checksums.items() if tensor.numel() and checksum.watches(tensor))
        return next(names, "")

    def forget(self, prefix: str) -> None:
        """Stop watching the tensors whose name begins with ``prefix``."""
        self._checksums = {name: checksum for name, checksum in self._checksums.items() if not name.startswith(prefix)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the watched tensors, in the order of ``changed``."""
        return tuple(self._checksums)

    def changed(self) -> list[torch.Tensor]:
        """Return a boolean on the device for each name: True if its memory has changed."""
        return [checksum.changed() for checksum in self._checksums.values()]


def guarded_out(layout: Layout, device: torch.device, payload: int) -> tuple[torch.Tensor, Guards]:
    """Return a poisoned tensor of the layout and the guards around and between its elements."""
    row = max((*layout.stride[-2:], layout.size[-1]))
    room = min(GUARD_TILE * (row + 1) * layout.dtype.itemsize, MOST_GUARD_BYTES)
    out = allocate(layout, device, guard_bytes=room)
    poison(out, payload)
    return out, Guards(out)


def poison_free_memory(layout: Layout, device: torch.device, payload: int) -> torch.Tensor | None:
    """Leave poison in the free memory that an allocation of the layout's size gets next, so that unwritten elements show.

    Neither allocator guarantees this, but from 1 KB on nearly every result lands in poison. The caller keeps the returned
    tensor alive until that allocation. On a CPU it lies above the poisoned places, which the C library would otherwise give
    back to the system.
    """
    size = Layout.contiguous(layout.size, layout.dtype)
    size_bytes = size.span * layout.dtype.itemsize
    if not 0 < size_bytes <= ALWAYS_FRESH_BYTES["cpu" if device.type == "cpu" else "cuda"]:
        return None
    small = size_bytes <= SMALL_BYTES
    copies = max(2, min(COPIES["small" if small else "large"], MOST_POISONED_BYTES // size_bytes))
    places: list[torch.Tensor] = []
    for _ in range(1 if small or device.type != "cpu" else 2):
        places.clear()  # glibc takes this size from its heap once it has freed one
        places += (torch.empty(layout.size, dtype=layout.dtype, device=device) for _ in range(copies))
        for place in places:
            poison(place, payload)
    return places[-1]


class PoisonedAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which every new tensor that torch leaves uninitialised holds poison of its dtype.

    It does not see allocations inside torch's own kernels, and slows every operator. So it serves a single call.
    """

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY and type(result) is torch.Tensor and result.dtype in POISONS:
            poison(result, POISONS[result.dtype][0])
        return result
