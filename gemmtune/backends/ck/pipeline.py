"""Compile-time decisions of CK's pipelines about the steps along K."""

from __future__ import annotations

from dataclasses import dataclass

from .instances import WAVE, Instance

PREFETCHED = {"v1": 1, "v3": 2, "v4": 3, "v5": 3}
"""Steps whose loads are in flight before the loop. For v2 the number depends on the tile."""
LDS_BUFFERS = {"v4": 2}
"""LDS buffers of a step, for pipelines with several."""
UNROLLED = 2
"""Steps in one iteration of the loop of v4 and v5."""
IN_FLIGHT_BYTES = 32768
"""Bytes that v2 keeps in flight for each compute unit."""
MOST_IN_FLIGHT = 8
SIMDS = 4
"""SIMD units of a compute unit."""
NUMBERS = ("Full", "One", "Two", "Three", "Four", "Five", "Six", "Seven")
"""CK's names for the steps that remain after whole iterations of the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Decisions of CK's host code by number of steps: is there a loop, and how many steps follow. ``steps`` is the least one."""

    loop: bool
    tail: str
    steps: int


def prefetched(instance: Instance) -> int:
    """Return the steps whose loads are in flight before the loop begins."""
    if instance.version != "v2":
        return PREFETCHED[instance.version]
    blocks = max(SIMDS * WAVE // instance.threads, 1)
    step_bytes = (instance.block_m + instance.block_n) * instance.bytes_k
    return min(max(-(-(IN_FLIGHT_BYTES // blocks) // step_bytes), 2), MOST_IN_FLIGHT)


def why_too_short(instance: Instance, steps: int) -> str | None:
    """Return why a pipeline cannot serve a sum of ``steps`` steps, or None."""
    least = 1 if instance.version == "v1" else prefetched(instance) + 1
    if steps < least:
        return f"pipeline {instance.version} prefetches {prefetched(instance)} steps: needs at least {least} along K"
    return None


def path_of(instance: Instance, steps: int) -> Path:
    """Return the kernel's path for ``steps`` steps, which ``why_too_short`` must accept."""
    ahead = prefetched(instance)
    loop = steps > ahead
    if instance.version in ("v1", "v3"):
        return Path(loop=loop, tail="Full", steps=ahead + 1 if loop else 1)
    if instance.version == "v2":
        return Path(loop=loop, tail=NUMBERS[steps % ahead], steps=ahead + (steps % ahead or ahead))
    odd = steps % UNROLLED == 1
    return Path(loop=loop, tail="Odd" if odd else "Even", steps=ahead + 1 + ((ahead + 1) % UNROLLED != odd))
