"""Host cost of a warm call before its kernel."""

import functools
import time
from typing import Any

import torch

from ..device import DeviceInfo
from ..native.lookup import native
from ..settings import Settings
from .keys import NOTHING, key_of

BLOCKS = 200
CALLS = 10
"""Calls of one sample, few so that other processes leave some samples undisturbed."""


def host_us(device: DeviceInfo, settings: Settings) -> float:
    """Return the microseconds of a warm call before its kernel if choices are timed as whole calls, else 0.

    A GPU replays graphs, so kernel time counts there. On a CPU, and with ``timing="eager"``, the whole call counts: its look-up is
    native if the module is in use, else Python's.
    """
    if device.type != "cpu" and settings.timing != "eager":
        return 0.0
    return _look_up_us(device.torch_device, native.module if settings.native and native.call is not None else None)


@functools.cache
def _look_up_us(device: torch.device, module: Any) -> float:
    """Measure the least time of a look-up, once for each module in a process."""
    x = torch.zeros((1, 1), device=device)
    ready = {key_of("mm", (x, x)): None}

    def look_up() -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if module is None:
            ready.get(key_of("mm", (x, x)))
        else:
            module.found("mm", None, None, NOTHING, NOTHING, NOTHING, None, None, x, x)

    best_s = float("inf")
    for _ in range(BLOCKS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            look_up()
        best_s = min(best_s, time.perf_counter() - begun)
    return best_s / CALLS * 1e6
