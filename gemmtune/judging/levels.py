"""Levels of a judgement: how many cases and calls, and how long."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MOST_CALL_S = 86_400.0
"""Largest time limit of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Amount of work for one GEMM."""

    cases: int
    """Cases of the conformance suite."""
    values_s: float
    """Seconds after which no case begins."""
    small_calls: int
    """Checked calls of each small shape."""
    shapes: int
    """Number of shapes whose time is compared with torch's."""
    named_shapes: int
    """Largest number of shapes of usual sizes, and of those that the source names."""
    named_s: float
    """Seconds for these."""
    timed_calls: int
    """Checked calls of each of these shapes, in pairs with torch's."""
    calls_s: float
    """Seconds after which no further shape begins."""
    largest: int
    """Largest number of multiplications of a timed shape on a CPU, in millions."""
    composed_calls: int
    """Calls of each shape whose operands have several kinds of structure."""
    composed_s: float
    """Seconds for these."""
    profiled: int
    """Calls of each shape in which torch's operations are counted."""


LEVELS: Mapping[str, Level] = MappingProxyType({
    "brief": Level(
        cases=12, values_s=3, small_calls=40, shapes=1, named_shapes=16, named_s=2, timed_calls=12, calls_s=5, largest=30,
        composed_calls=150, composed_s=0.5, profiled=2,
    ),
    "normal": Level(
        cases=160, values_s=15, small_calls=220, shapes=4, named_shapes=48, named_s=6, timed_calls=40, calls_s=22, largest=600,
        composed_calls=500, composed_s=1.5, profiled=3,
    ),
    "full": Level(
        cases=1000, values_s=120, small_calls=1200, shapes=8, named_shapes=200, named_s=25, timed_calls=80, calls_s=120,
        largest=1500, composed_calls=2000, composed_s=8, profiled=4,
    ),
})  # fmt: skip
"""Levels by name. ``normal`` takes at most a minute, and makes more than 500 calls that are checked."""
