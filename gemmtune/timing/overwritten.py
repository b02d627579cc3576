"""Operands of a timer that get other values in the same memory, as between two steps of a program."""

from collections.abc import Callable
from typing import Literal

import torch

from ..choice import Choice
from ..numerics.block_sparse import parts
from ..numerics.buffers import distinct, flat, overlapping
from ..numerics.operands import Operands
from ..problem import Layout

Side = Literal["a", "b"]
"""b, or all other operands of a call."""
Place = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Memory, its values before, and its new values."""
INDICES = (torch.int32, torch.int64)
"""Dtypes of operands that say where others lie. A mixture of two of them need not be legal."""


class Overwritten:
    """One operand set whose memory holds values of ``new`` until ``restore``.

    torch does not count these writes (``_version``), as it does not count those of kernels and of other libraries.
    ``packed`` returns the set's b in the form of a choice.
    """

    def __init__(self, live: Operands, new: Operands, packed: Callable[[Choice], torch.Tensor]) -> None:
        self.out = live.out
        self._live = live
        self._new = new
        self._packed = packed
        self._places: dict[Side, list[Place]] = {"a": [], "b": []}
        self._formats: dict[str | None, bool] = {}
        pairs = [(old, new.named[role]) for role, old in live.named.items() if role != "b"]
        self._fits = all(self._add("a", old, value) for old, value in (*pairs, *zip(live.extra, new.extra, strict=True)))

    def holds(self, choice: Choice) -> bool:
        """Return True if the new values fit into the memory, with b in the form of the choice. They then change with the others."""
        name = choice.packed_format
        if name not in self._formats:
            b = self._new.named["b"]
            self._formats[name] = self._add("b", self._b(choice), b if name is None else choice.pack(b))
        return self._fits and self._formats[name]

    def write(self, side: Side, *, whole: bool = True) -> None:
        """Write the new values of one side, or only its first and its last number among the earlier values. Wait for the device."""
        for memory, before, new in self._places[side]:
            memory.copy_(new if whole or memory.dtype in INDICES else before)
            if not whole and memory.numel():
                for end in (0, -1):
                    memory[(end,) * memory.dim()] = new[(end,) * memory.dim()]
        self._wait()

    def restore(self) -> None:
        """Write the earlier values back, and wait for the device."""
        for places in self._places.values():
            for memory, before, _ in places:
                memory.copy_(before)
        self._wait()

    def _wait(self) -> None:
        if self.out.is_cuda:
            torch.cuda.synchronize(self.out.device)

    def _b(self, choice: Choice) -> torch.Tensor:
        return self._live.named["b"] if choice.packed_format is None else self._packed(choice)

    def _add(self, side: Side, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Add a tensor and its new values. Return False if they do not fit."""
        if old.layout != new.layout or old.dtype != new.dtype:
            return False
        pairs = list(zip(parts(old), parts(new), strict=True))
        if not all(_alike(x, y) for x, y in pairs):
            return False
        for x, y in pairs:
            # A tensor with the same memory has a version of its own.
            view = torch.empty(0, dtype=x.dtype, device=x.device)
            memory = _memory(view.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride()))
            self._places[side].append((memory, memory.clone(), _memory(y)))
        return True


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return True if the elements of one can take those of the other: new values are drawn without the gaps of large spans."""
    if old.shape != new.shape:
        return False
    return old.stride() == new.stride() or not (overlapping(Layout.of(old)) or overlapping(Layout.of(new)))


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor, each once, without the gaps between them."""
    return flat(tensor) if overlapping(Layout.of(tensor)) else distinct(tensor)
