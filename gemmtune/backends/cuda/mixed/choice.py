"""What the choices of kernels for mixed_mm have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ..choice import NAME, TMA_BYTES, CudaChoice
from .config import MixedConfig
from .launch import Launch, launch_of
from .legality import is_along_k

__all__ = ["MixedChoice"]

C = TypeVar("C", bound=MixedConfig)


@dataclass(frozen=True, kw_only=True)
class MixedChoice(CudaChoice[C]):
    """A kernel that widens weights, and adds up float32 sums over parts of K."""

    @classmethod
    def named(
        cls, label: str, config: C, problem: Problem, device: DeviceInfo, *, splits: int, rounds: bool, info: dict[str, Any]
    ) -> Self:
        """The choice of ``config``, with ``info`` beside what a launch is told; ``label`` says all of it.

        ``splits``: parts of K; ``rounds``: weights are rounded to a's dtype when zero points are subtracted or they are scaled.
        """
        claims = Claims(
            accumulate=torch.float32,
            partials=torch.float32,
            epilogue_input=torch.float32,
            splits=splits,
            weights=problem.dtype if rounds else None,
        )
        told = {"pdl": config.pdl, "ahead": config.ahead, "takes_turns": config.takes_turns, "splits": splits}
        name = f"{NAME}:{label}"
        return cls(name=name, backend=NAME, problem=problem, claims=claims, info=info | told, config=config, device=device)

    def launch(self, device: int) -> Launch:
        """All but addresses."""
        return launch_of(self.config, self.problem, device)

    @property
    def aligned_operands(self) -> Sequence[tuple[int, int]]:
        """Scales and zero points that TMA copies."""
        return [(i, TMA_BYTES) for i, along_k in enumerate(is_along_k(self.problem)) if along_k]
