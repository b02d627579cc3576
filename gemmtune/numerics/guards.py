"""Finding writes outside of out and into inputs, on the device and without waiting for it."""

from __future__ import annotations

import torch

from ..problem import Layout
from .operands import guard_mask, storage_bits

__all__ = ["Checksum", "Guards"]

LANES = 251
"""Sums are kept apart by position modulo this prime, so that exchanged elements show."""


class Guards:
    """Watches everything in out's buffer that is not an element of out: both guard bands, and the padding between its rows."""

    def __init__(self, out: torch.Tensor) -> None:
        self._bits = storage_bits(out)
        self._first = out.storage_offset()
        self._span = Layout.of(out).span
        self._mask = guard_mask(out)

    def broken(self, payload: int) -> torch.Tensor:
        """float64 [2]: whether a guard no longer holds ``payload``, and where in the buffer."""
        if self._mask is not None:
            changed = (self._bits != payload) & self._mask
            return torch.stack([changed.any(), changed.to(torch.uint8).argmax()]).double()
        end = self._first + self._span
        changed = torch.cat([self._bits[: self._first], self._bits[end:]]) != payload
        position = changed.to(torch.uint8).argmax()
        position += (position >= self._first) * self._span
        return torch.stack([changed.any(), position]).double()

    def describe(self, position: int) -> str:
        """Where ``position`` of the buffer lies, seen from out."""
        distance = position - self._first
        if distance < 0:
            return f"wrote outside of out, {-distance} elements before its first"
        if distance >= self._span:
            return f"wrote outside of out, {distance - self._span + 1} elements after its last"
        return f"wrote into the padding of out, {distance} elements after its first"


class Checksum:
    """Sums over the words of a tensor's whole buffer, taken when made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._words = storage_bits(tensor, torch.int64 if tensor.untyped_storage().nbytes() % 8 == 0 else torch.uint8)
        self._sums = self._sum()

    def watches(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the buffer."""
        return tensor.untyped_storage().data_ptr() == self._words.untyped_storage().data_ptr()

    def changed(self) -> torch.Tensor:
        """A boolean on the device: whether the buffer now has other sums."""
        return (self._sum() != self._sums).any()

    def _sum(self) -> torch.Tensor:
        whole = self._words.numel() // LANES * LANES
        lanes = self._words[:whole].view(-1, LANES).sum(dim=0, dtype=torch.int64)
        return torch.cat([lanes, self._words[whole:].to(torch.int64)])
