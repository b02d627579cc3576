"""How CK's pipelines go through the steps along K: what is decided where a kernel is compiled, and not at its launch."""

from __future__ import annotations

from dataclasses import dataclass

from .instances import WAVE, Instance

PREFETCHED = {"v1": 1, "v3": 2, "v4": 3, "v5": 3}
"""Steps whose loads are on their way before the loop; that of v2 depends on the tile."""
LDS_BUFFERS = {"v4": 2}
"""Buffers of a step in LDS, where there are several."""
UNROLLED = 2
"""Steps of one round of the loop of v4 and v5."""
IN_FLIGHT_BYTES = 32768
"""Bytes that v2 keeps on their way for each compute unit."""
MOST_IN_FLIGHT = 8
SIMDS = 4
"""SIMD units of a compute unit."""
NUMBERS = ("Full", "One", "Two", "Three", "Four", "Five", "Six", "Seven")
"""CK's names for the steps that are left after whole rounds of the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What CK's host code decides by the number of steps: whether there is a loop, and how many steps come after it.

    ``steps`` is the least number that decides so.
    """

    loop: bool
    tail: str
    steps: int


def prefetched(instance: Instance) -> int:
    """Steps whose loads are on their way before the loop begins."""
    if instance.version != "v2":
        return PREFETCHED[instance.version]
    blocks = max(SIMDS * WAVE // instance.threads, 1)
    step_bytes = (instance.block_m + instance.block_n) * instance.bytes_k
    return min(max(-(-(IN_FLIGHT_BYTES // blocks) // step_bytes), 2), MOST_IN_FLIGHT)


def why_too_short(instance: Instance, steps: int) -> str | None:
    """Why a pipeline cannot serve a sum of so many steps, or None."""
    least = 1 if instance.version == "v1" else prefetched(instance) + 1
    if steps < least:
        return f"pipeline {instance.version} has {prefetched(instance)} steps on their way: needs {least} along K"
    return None


def path_of(instance: Instance, steps: int) -> Path:
    """The path of the kernel for so many steps, which ``why_too_short`` lets pass."""
    ahead = prefetched(instance)
    loop = steps > ahead
    if instance.version in ("v1", "v3"):
        return Path(loop=loop, tail="Full", steps=ahead + 1 if loop else 1)
    if instance.version == "v2":
        return Path(loop=loop, tail=NUMBERS[steps % ahead], steps=ahead + (steps % ahead or ahead))
    odd = steps % UNROLLED == 1
    return Path(loop=loop, tail="Odd" if odd else "Even", steps=ahead + 1 + ((ahead + 1) % UNROLLED != odd))
