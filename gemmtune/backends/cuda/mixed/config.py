"""What a launch of a kernel for mixed_mm is told, beside its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .weights import Weights

__all__ = ["MixedConfig"]


class Labelled(Protocol):
    """A shape of a kernel."""

    def label(self, weights: Weights) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig:
    """``blocks`` of a cluster divide K; with ``takes_turns`` step by step rather than a piece of it each.

    ``pdl``: the launch may begin before the one before it has ended; ``ahead`` steps are then asked into L2 meanwhile.
    """

    shape: Labelled
    blocks: int = 1
    takes_turns: bool = False
    pdl: bool = False
    ahead: int = 0

    def label(self, weights: Weights) -> str:
        """Such as ``16x128x256_s4_w2x2_k2_turns_pdl4``."""
        overlap = f"_pdl{self.ahead or ''}" if self.pdl else ""
        return f"{self.shape.label(weights)}_k{self.blocks}{'_turns' if self.takes_turns else ''}{overlap}"
