"""Whether a machine had other work while something was measured on it."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from pathlib import Path

import torch

from ..device import DeviceInfo

MOST_OF_THE_CORES = 0.15
"""The share of a CPU's time that others may have without a word: a system has something to do now and then."""
MOST_SPREAD = {"cpu": 0.1, "cuda": 0.04}
"""How far samples of torch's own operation may lie apart, as a share of their median: four times what quiet machines show."""
MOST_DRIFT = 3.0
"""How many times as long a choice may take on a CPU as when it was ranked: clocks change by less, and what is scaled by more than
that may be wrong by as much."""
BUSY_PERCENT = 10
"""A process with less of a GPU's multiprocessors does not count."""


class Watch:
    """Sees what other processes do, from when it is made until it is asked.

    On a CPU that is their share of its time (and what a hypervisor took), as Linux counts it; on a GPU whether several processes
    had the multiprocessors, as far as nvidia-ml-py and the driver tell.
    """

    def __init__(self, device: DeviceInfo) -> None:
        self._device = device
        self._begun_us = time.time_ns() // 1000
        self._begun_s = _times()

    def seen(self) -> str:
        """What was seen, as a part of a sentence; empty if nothing."""
        if self._device.type == "cpu":
            wall_s, busy_s = (now - then for now, then in zip(_times(), self._begun_s, strict=True))
            share = busy_s / max(wall_s * (os.cpu_count() or 1), 1e-9)
            return f"other processes had {100 * min(share, 1):.0f}% of the cores" if share > MOST_OF_THE_CORES else ""
        count = 0
        with contextlib.suppress(ImportError, RuntimeError):
            nvml = importlib.import_module("pynvml")
            with contextlib.suppress(nvml.NVMLError):
                samples = nvml.nvmlDeviceGetProcessUtilization(torch.cuda._get_pynvml_handler(self._device.index), self._begun_us)
                count = len({sample.pid for sample in samples if sample.smUtil >= BUSY_PERCENT})
        return f"{count} processes had the GPU" if count > 1 else ""


def drifts_too_far(device: DeviceInfo, drift: float) -> bool:
    """Whether a factor between the times of one choice, now and before, is none of clocks."""
    return device.type == "cpu" and not 1 / MOST_DRIFT <= drift <= MOST_DRIFT


def disturbance(device: DeviceInfo, seen: str, spread: float, drift: float = 1.0) -> str:
    """Why a measurement should not be relied on, as a part of a sentence; empty if nothing speaks against it.

    ``seen`` is what a ``Watch`` saw meanwhile, ``spread`` how far the samples of torch's own operation lay apart, ``drift`` how
    many times as long what was known before took now.
    """
    wide = spread > MOST_SPREAD["cpu" if device.type == "cpu" else "cuda"]
    drifted = drifts_too_far(device, drift)
    reasons = {
        seen: bool(seen),
        f"times of torch spread by {100 * spread:.0f}%": wide,
        f"what was known took {drift:.{1 if drift < 10 else 0}f} times as long as before": drifted,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _times() -> tuple[float, float]:
    """Seconds now, and seconds that the cores together worked for others than this process; 0 where the system does not tell."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return time.monotonic(), 0.0
    user, nice, system, _idle, _waiting, irq, softirq, stolen = fields
    busy_s = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy_s - time.process_time()
