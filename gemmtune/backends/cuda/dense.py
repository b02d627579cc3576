"""What the texts of the kernels for dense products have in common."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from ..cpp.printer import STORAGE_TYPES
from .finish import Finish
from .parts import ELEMENTS, MAP_TYPES
from .source import KernelSource, flag

__all__ = ["DenseSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSource(KernelSource):
    """out = epilogue(alpha · p @ qᵀ + beta · inp): p gives a tile its rows, and q its columns."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    p_by_k: bool
    """K is the contiguous dimension of p …"""
    q_by_k: bool
    """… and of q."""
    finish: Finish = field(default_factory=Finish)

    @property
    def asked(self) -> dict[str, object]:
        """Of what the templates are given, what a kernel's shape has no part in."""
        return {
            "element": ELEMENTS[self.dtype],
            "map_type": MAP_TYPES[self.dtype],
            "out_type": STORAGE_TYPES[self.out_dtype],
            "operands": len(self.finish.operands),
            "q_by_k": flag(self.q_by_k),
            "q_transposed": int(not self.q_by_k),
            "fused": self.finish.fused,
        }

    @property
    def passed(self) -> int:
        """Operands of a call beside a and b."""
        return len(self.finish.operands)

    @property
    def fused(self) -> bool:
        """More than the bare product is stored."""
        return self.finish.fused

    @property
    def shared(self) -> dict[str, str]:
        """What becomes of a sum."""
        return {"finished": self.finish.text}

    @property
    def made_of(self) -> str:
        """Of what is fused, its text: the sizes of an epilogue's operands are in its graph, and change nothing."""
        return f"{dataclasses.replace(self, finish=Finish())} {self.finish.text}"
