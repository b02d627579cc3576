"""What a launch of a kernel for mixed_mm is told, beside its shape; and what its choices say of themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from .weights import Weights

__all__ = ["MixedConfig", "told", "variants"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig:
    """``cluster_k`` blocks of a cluster divide K; with ``interleaved_k`` step by step rather than a piece of it each.

    ``pdl``: the launch may begin before the one before it has ended; ``prefetch_stages`` are then asked into L2 meanwhile.
    """

    shape: Any
    cluster_k: int = 1
    interleaved_k: bool = False
    pdl: bool = False
    prefetch_stages: int = 0

    def label(self, weights: Weights) -> str:
        """A name such as ``i4_16x128x256_s4_w2x2_k2_interleaved_pdl4``."""
        overlap = f"_pdl{self.prefetch_stages or ''}" if self.pdl else ""
        interleaved = "_interleaved" if self.interleaved_k else ""
        return f"i{weights.bits}_{self.shape.label(weights)}_k{self.cluster_k}{interleaved}{overlap}"


C = TypeVar("C", bound=MixedConfig)


def variants(config: C, cluster_sizes: Iterable[int]) -> Iterator[C]:
    """How it begins, how the blocks of a cluster divide K, and how many they are."""
    yield dataclasses.replace(config, pdl=not config.pdl, prefetch_stages=0)
    if config.pdl:
        yield dataclasses.replace(config, prefetch_stages=0 if config.prefetch_stages else config.shape.stages)
    if config.cluster_k > 1:
        yield dataclasses.replace(config, interleaved_k=not config.interleaved_k)
    for size in cluster_sizes:
        if size != config.cluster_k:
            yield dataclasses.replace(config, cluster_k=size)


def told(config: MixedConfig, *, tile: tuple[int, int, int], splits: int) -> dict[str, Any]:
    """The config for the log."""
    shape = config.shape
    return {
        "tile": list(tile),
        "stages": shape.stages,
        "warps": shape.threads // 32,
        "cluster": config.cluster_k,
        "pdl": config.pdl,
        "prefetch_stages": config.prefetch_stages,
        "interleaved_k": config.interleaved_k,
        "splits": splits,
    }
