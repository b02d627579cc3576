"""Detection of other work on the machine during a measurement."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from pathlib import Path

import torch

from ..device import DeviceInfo

MOST_OF_THE_CORES = 0.15
"""Share of a CPU's time that other processes may use without a report, because a system always does some work."""
MOST_SPREAD = {"cpu": 0.1, "cuda": 0.04}
"""Largest spread of the samples of torch's operation, as a share of their median: four times that of quiet machines."""
MOST_DRIFT = 3.0
"""Largest ratio of a choice's time on a CPU to its time when it was ranked.

Clocks change by less. Times scaled by a larger ratio may be wrong by that ratio.
"""
BUSY_PERCENT = 10
"""Share of a GPU's multiprocessors below which a process does not count."""


class Watch:
    """Observer of other processes from its construction until ``seen`` is called.

    On a CPU it measures the share of time that others used and a hypervisor took, as Linux counts it. On a GPU it counts the
    processes that used the multiprocessors, if nvidia-ml-py and the driver report them.
    """

    def __init__(self, device: DeviceInfo) -> None:
        self._device = device
        self._begun_us = time.time_ns() // 1000
        self._begun_s = _times()

    def seen(self) -> str:
        """Describe the other work as part of a sentence, or return "" if there was none."""
        if self._device.type == "cpu":
            wall_s, busy_s = (now - then for now, then in zip(_times(), self._begun_s, strict=True))
            share = busy_s / max(wall_s * (os.cpu_count() or 1), 1e-9)
            return f"other processes used {100 * min(share, 1):.0f}% of the cores" if share > MOST_OF_THE_CORES else ""
        count = 0
        with contextlib.suppress(ImportError, RuntimeError):
            nvml = importlib.import_module("pynvml")
            with contextlib.suppress(nvml.NVMLError):
                samples = nvml.nvmlDeviceGetProcessUtilization(torch.cuda._get_pynvml_handler(self._device.index), self._begun_us)
                count = len({sample.pid for sample in samples if sample.smUtil >= BUSY_PERCENT})
        return f"{count} processes used the GPU" if count > 1 else ""


def drifts_too_far(device: DeviceInfo, drift: float) -> bool:
    """Return True if a choice's time now, divided by its time before, cannot be explained by clocks."""
    return device.type == "cpu" and not 1 / MOST_DRIFT <= drift <= MOST_DRIFT


def disturbance(device: DeviceInfo, seen: str, spread: float, drift: float = 1.0) -> str:
    """Explain as part of a sentence why a measurement is unreliable, or return "" if it is reliable.

    ``seen`` is the report of a ``Watch`` during the measurement. ``spread`` is the spread of the samples of torch's
    operation. ``drift`` is the time of an already ranked choice now, divided by its time before.
    """
    wide = spread > MOST_SPREAD["cpu" if device.type == "cpu" else "cuda"]
    drifted = drifts_too_far(device, drift)
    reasons = {
        seen: bool(seen),
        f"times of torch spread by {100 * spread:.0f}%": wide,
        f"a choice took {drift:.{1 if drift < 10 else 0}f} times as long as when it was ranked": drifted,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _times() -> tuple[float, float]:
    """Return the current time and the seconds that all cores worked for other processes, 0 if the system does not report it."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return time.monotonic(), 0.0
    user, nice, system, _idle, _waiting, irq, softirq, stolen = fields
    busy_s = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy_s - time.process_time()
