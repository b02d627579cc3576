"""The kernels of one step of a model, and how long the GPU is busy with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Trace", "trace_of", "traced"]

MOST_KERNELS = 40
REPEATS = 3
"""Steps that are traced. The fastest of them counts."""
GEMM_WORDS = ("gemm", "nvjet", "cutlass", "cluster", "skinny", "wgmma", "splitk", "mm_", "_mm", "addmm", "gemv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Kernels of one step as (name, begin and end in µs), in their order. Empty on a CPU."""

    spans: tuple[tuple[str, float, float], ...] = ()

    @property
    def busy_us(self) -> float:
        """The time during which at least one kernel runs."""
        busy, last = 0.0, float("-inf")
        for _, begin, end in sorted(self.spans, key=lambda span: span[1]):
            busy += max(0.0, end - max(begin, last))
            last = max(last, end)
        return busy

    def idle_us(self, shorter: float = 0.0, longer: float = float("inf")) -> float:
        """Return the time in pauses between kernels that take from ``shorter`` up to ``longer`` µs."""
        idle, last = 0.0, float("inf")
        for _, begin, end in sorted(self.spans, key=lambda span: span[1]):
            pause = max(0.0, begin - last)
            idle += pause if shorter <= pause < longer else 0.0
            last = end if last == float("inf") else max(last, end)
        return idle

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """Name, count and time in µs of each kernel, the longest first."""
        found: dict[str, dict[str, Any]] = {}
        for name, begin, end in self.spans:
            row = found.setdefault(name, {"kernel": name[:120], "count": 0, "us": 0.0})
            row["count"] += 1
            row["us"] += end - begin
        return sorted(found.values(), key=lambda row: -row["us"])[:MOST_KERNELS]

    @property
    def gemm_share(self) -> float | None:
        """The share of the kernels' time that products take, with all that is fused with them. None on a CPU."""
        times = [(end - begin, any(word in name.lower() for word in GEMM_WORDS)) for name, begin, end in self.spans]
        total = sum(time for time, _ in times)
        return sum(time for time, product in times if product) / total if total else None


def traced(step: Callable[[], object], device: torch.device) -> Trace:
    """Trace a step, which may be the replay of a CUDA graph."""
    if device.type == "cpu":
        return Trace()
    best = None
    for _ in range(REPEATS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize(device)
        found = trace_of(profile)
        best = found if best is None or found.busy_us < best.busy_us else best
    assert best is not None
    return best


def trace_of(profile: torch.profiler.profile) -> Trace:
    """Return the kernels that a profile has recorded."""
    return Trace(spans=tuple(sorted(_spans(profile.events()), key=lambda span: span[1])))


def _spans(events: Iterable[Any]) -> Iterable[tuple[str, float, float]]:
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Mem", "Activity")):
            yield event.name, event.time_range.start, event.time_range.end
