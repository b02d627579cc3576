"""Detection of other work on the machine during a measurement, and the wait for a quiet machine."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable

import torch

from ..device import DeviceInfo
from . import cores

MOST_OF_THE_CORES = 0.15
"""Share of the usable cores, or of a quota's periods, that may be lost without a report. A system always does some work."""
MOST_SPREAD = {"cpu": 0.1, "cuda": 0.04}
"""Largest spread of the samples of torch's operation, as a share of their median: four times that of quiet machines."""
MOST_DRIFT = 3.0
"""Largest ratio of a choice's times on a CPU when now and when ranked: clocks change by less."""
BUSY_PERCENT = 10
"""Share of a GPU's multiprocessors below which a process does not count."""
LEAST_WATCH_S = 0.3
"""Shortest time that a ``Watch`` looks at, because Linux counts in steps of 10 ms."""
MOST_WAIT_S = 120.0
"""Longest wait for a quiet machine."""


class Watch:
    """Observer of other processes from its construction until ``seen`` is called.

    On a CPU, the default, it looks at the cores that this process may use: the share that others had of them, and the periods
    in which its cgroup had used up its quota. On a GPU it counts the processes that used the multiprocessors, if nvidia-ml-py and
    the driver report them. ``root`` and its descendants are never others. By default they are this process and its children.
    """

    def __init__(self, device: DeviceInfo | None = None, root: int | None = None) -> None:
        self._gpu = device.index if device is not None and device.type != "cpu" else None
        self._root = root or os.getpid()
        self._begun_us = time.time_ns() // 1000
        self._before = cores.read(self._root) if self._gpu is None else None

    def seen(self) -> str:
        """Describe the other work as part of a sentence, or return "" if there was none. Takes LEAST_WATCH_S if that is left."""
        if self._before is None:
            return self._seen_on_gpu()
        time.sleep(max(0.0, LEAST_WATCH_S - (time.monotonic() - self._before.wall_s)))
        now = cores.read(self._root)
        others, throttled = now.others_share(self._before), now.throttled_share(self._before)
        reasons = {
            f"other processes used {100 * others:.0f}% of the cores": others > MOST_OF_THE_CORES,
            f"the CPU quota was used up in {100 * throttled:.0f}% of its periods": throttled > MOST_OF_THE_CORES,
        }
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def _seen_on_gpu(self) -> str:
        count = 0
        with contextlib.suppress(ImportError, RuntimeError):
            nvml = importlib.import_module("pynvml")
            with contextlib.suppress(nvml.NVMLError):
                samples = nvml.nvmlDeviceGetProcessUtilization(torch.cuda._get_pynvml_handler(self._gpu), self._begun_us)
                users = {sample.pid for sample in samples if sample.smUtil >= BUSY_PERCENT}
                # In a container the driver's process ids differ from ours. Then one of them is this process.
                ours = users & cores.tree(self._root).keys()
                count = len(users - ours) if ours else len(users) - 1
        return f"{count + 1} processes used the GPU" if count > 0 else ""


def wait_until_quiet(device: DeviceInfo, tell: Callable[[str], None]) -> None:
    """Wait until others leave the machine alone, at most MOST_WAIT_S. ``tell`` gets a line if that takes a while."""
    deadline = time.monotonic() + MOST_WAIT_S
    reported = False
    while (seen := Watch(device).seen()) and time.monotonic() < deadline:
        if not reported:
            tell(f"waiting up to {MOST_WAIT_S:.0f} s for a quiet machine: {seen}")
            reported = True
        time.sleep(1.0)


def drifts_too_far(device: DeviceInfo, drift: float) -> bool:
    """Return True if a choice's time now, divided by its time before, cannot be explained by clocks."""
    return device.type == "cpu" and not 1 / MOST_DRIFT <= drift <= MOST_DRIFT


def credible_ratio(above_us: float | None, below_us: float | None, disturbed: str) -> float | None:
    """Return the ratio of two times. None if one is unknown, or if it is so large that the disturbance of a time explains it."""
    if not above_us or not below_us:
        return None
    ratio = above_us / below_us
    return None if disturbed and not 1 / MOST_DRIFT <= ratio <= MOST_DRIFT else ratio


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
