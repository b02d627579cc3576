"""The table of effort: how much each search (``quick``, ``default``, ``exhaustive``) compiles, tries and measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .settings import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much one search does for one problem."""

    configs: Mapping[str, int | None]
    """How many configs are tried, the likely best first, by the name of a template or of a backend that has one; None for
    every legal one. One takes a second to compile with Triton, three with a C++ compiler, half a minute with CUTLASS or CK."""
    variant_kernels: int
    """How many kernels, the fastest by what is known, have their launch variants tried, …"""
    variant_near: float
    """… unless they are slower than the fastest choice by more than this factor; …"""
    variant_rounds: int
    """… and how often at most: those of a variant that won are others."""
    densified: int | None
    """How many choices for the dense product each backend adds to those for a block-sparse one, the likely best first."""
    axis_points: int
    """How many further points are tried along the axes of the fastest choice of a template that has such; …"""
    axis_near: float
    """… unless it is slower than the fastest of all by more than this factor."""
    entrants: int
    """How many choices enter the final rounds at most. Short measurements come one after the other, each beside what the machine
    does just then, and tell little of those that are near."""
    rounds_s: float
    """How long the final rounds go on with what cannot be told apart."""
    rows_apart: float
    """The factor by which Ms of a range differ at which everything competes; at those between, what was among the best of these."""


_CONFIGS: Mapping[str, tuple[int, int, int | None]] = {
    "triton:mm": (8, 24, None),
    "triton:persistent": (2, 6, None),
    "triton:swapped": (2, 6, None),
    "triton:vector": (2, 5, None),
    "triton:parts": (2, 6, None),
    "triton:words": (3, 12, None),
    "triton:words_vector": (1, 4, None),
    "triton:blocks": (8, 24, None),
    "triton:grouped": (8, 24, None),
    "triton:padded": (3, 8, 24),
    "triton:padded_persistent": (1, 3, 12),
    "triton:atomic": (1, 3, 24),
    "cutlass": (3, 8, None),
    "ck": (2, 4, None),
    "cuda:bsr": (2, 6, None),
    "cuda:bsr_skinny": (2, 6, None),
    "cuda:cluster": (2, 5, None),
    "cuda:gemv": (2, 4, None),
    "cuda:grouped": (3, 8, None),
    "cuda:parts": (2, 5, None),
    "cuda:skinny": (2, 4, None),
    "cuda:wgmma": (2, 4, None),
    "cpp": (4, 10, None),
}
"""The configs tried in a quick, the default and an exhaustive search. Of 18 measured products, CUTLASS's first 8 always held the
fastest of 72.
Persistent, swapped and vector kernels of Triton take places of its mm template: of 92 measured products, the first 16 of this held
the fastest of 24, or one slower by 0.4%."""


def _configs(column: int) -> Mapping[str, int | None]:
    return MappingProxyType({name: counts[column] for name, counts in _CONFIGS.items()})


EFFORT: Mapping[str, Effort] = MappingProxyType(
    dict[Search, Effort](
        quick=Effort(
            configs=_configs(0),
            variant_kernels=1,
            variant_near=1.1,
            variant_rounds=1,
            densified=2,
            axis_points=0,
            axis_near=1.0,
            entrants=8,
            rounds_s=0.3,
            rows_apart=16.0,
        ),
        default=Effort(
            configs=_configs(1),
            variant_kernels=3,
            variant_near=1.25,
            variant_rounds=3,
            densified=8,
            axis_points=8,
            axis_near=1.25,
            entrants=16,
            rounds_s=0.6,
            rows_apart=8.0,
        ),
        exhaustive=Effort(
            configs=_configs(2),
            variant_kernels=8,
            variant_near=1.6,
            variant_rounds=6,
            densified=None,
            axis_points=160,
            axis_near=1.6,
            entrants=32,
            rounds_s=2.5,
            rows_apart=1.0,
        ),
    )
)
"""The effort by the setting ``search``."""
