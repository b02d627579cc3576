"""Table of effort: the amount that each search (``quick``, ``default``, ``exhaustive``) compiles, tries and measures."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .settings import Search

CPU_ROUNDS = 2.5
"""Factor on the duration of rounds on a CPU: its samples vary more, and every correct choice takes part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of one search for one problem."""

    configs: Mapping[str, int | None]
    """Number of configs to try by template, or by backend with its own ranking, the most promising first. None means every
    legal config.

    One config takes a second to compile with Triton, three with a C++ compiler, and half a minute with CUTLASS or CK.
    """
    variant_kernels: int
    """Number of fastest kernels whose launch variants are tried."""
    variant_near: float
    """Largest ratio of a kernel's time to the fastest choice at which its variants are tried."""
    variant_rounds: int
    """Largest number of rounds of variants, because a winner adds new variants."""
    densified: int | None
    """Number of choices for the dense product that each backend adds to those for a block-sparse one, the most promising first."""
    entrants: int
    """Largest number of choices in the final rounds.

    Short measurements run one after the other, each under momentary conditions of the machine, and cannot rank close choices.
    """
    rounds_s: float
    """Seconds of the final rounds among choices that cannot be distinguished."""
    rows_apart: float
    """Factor between the values of M in a range at which all choices compete. Between them, only the best of these compete."""


_CONFIGS: Mapping[str, tuple[int, int, int | None]] = {
    "triton:mm": (8, 24, None),
    "triton:persistent": (2, 6, None),
    "triton:swapped": (2, 6, None),
    "triton:vector": (2, 7, None),
    "triton:parts": (2, 6, None),
    "triton:words": (3, 12, None),
    "triton:words_vector": (1, 4, None),
    "triton:blocks": (8, 32, None),
    "triton:grouped": (8, 24, None),
    "triton:padded": (3, 8, 24),
    "triton:padded_persistent": (1, 3, 12),
    "cutlass": (3, 8, None),
    "ck": (2, 4, None),
    "cuda:bsr": (2, 6, None),
    "cuda:bsr_skinny": (2, 6, None),
    "cuda:cluster": (2, 8, None),
    "cuda:gemv": (2, 4, None),
    "cuda:grouped": (3, 8, None),
    "cuda:narrow": (1, 3, None),
    "cuda:parts": (2, 5, None),
    "cuda:skinny": (2, 4, None),
    "cuda:stream": (1, 4, None),
    "cuda:wgmma": (2, 4, None),
    "cuda:wgmma_stream": (1, 3, None),
    "cpp": (4, 10, None),
}
"""Number of configs in a quick, a default and an exhaustive search.

CUTLASS's first 8 contained the fastest of 72 in all of 18 measured products. Persistent, swapped and vector kernels of Triton
replace configs of its mm template. The first 16 of that template contained the fastest of 24, or one within 0.4%, in 92
measured products.
"""


_LIMITS: dict[str, tuple[Any, Any, Any]] = {
    "variant_kernels": (1, 3, 8),
    "variant_near": (1.1, 1.25, 1.6),
    "variant_rounds": (1, 3, 6),
    "densified": (2, 8, None),
    "entrants": (8, 16, 32),
    "rounds_s": (0.3, 0.6, 2.5),
    "rows_apart": (16.0, 8.0, 1.0),
}
"""Values of the other fields in a quick, a default and an exhaustive search."""


def _effort(column: int) -> Effort:
    configs = MappingProxyType({name: counts[column] for name, counts in _CONFIGS.items()})
    return Effort(configs=configs, **{name: values[column] for name, values in _LIMITS.items()})


EFFORT: Mapping[str, Effort] = MappingProxyType(dict[Search, Effort](quick=_effort(0), default=_effort(1), exhaustive=_effort(2)))
"""Effort by the setting ``search``."""
