"""Conditions of a measurement: flags and thread count of the problem, and exclusive use of the device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from ..cache import cache_dir
from ..device import DeviceInfo
from ..errors import UnavailableError
from ..locking import file_lock
from ..problem import Problem
from ..problem.flags import precision_scope
from ..settings import Settings

log = logging.getLogger("gemmtune")

LOCK_SHARE = 0.5
"""Share of ``choice_timeout_s`` for which a measurement waits until another process has finished its measurement."""


@contextlib.contextmanager
def conditions(problem: Problem, device: DeviceInfo) -> Iterator[None]:
    """Set the problem's precision, disable gradients, select the device and set its number of threads."""
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(precision_scope(problem))
        stack.enter_context(torch.no_grad())
        if device.type != "cpu":
            stack.enter_context(torch.cuda.device(device.torch_device))
        elif device.threads and device.threads != threads:
            torch.set_num_threads(device.threads)
            stack.callback(torch.set_num_threads, threads)
        yield


@contextlib.contextmanager
def device_to_itself(settings: Settings, device: DeviceInfo) -> Iterator[None]:
    """Keep other gemmtune processes from measuring on this device at the same time, if the lock can be acquired."""
    with contextlib.ExitStack() as stack:
        try:
            path = cache_dir("locks", quietly=True) / f"measure-{_identity(device)}.lock"
            stack.enter_context(file_lock(path, LOCK_SHARE * settings.choice_timeout_s))
        except (OSError, UnavailableError) as error:
            log.debug("cannot acquire the measurement lock, measuring without it: %s", error)
        yield


def _identity(device: DeviceInfo) -> str:
    """Return a name of the device itself. Its index is another one in a process with other visible devices."""
    if device.type != "cpu" and torch.cuda.is_available():
        return str(torch.cuda.get_device_properties(device.index).uuid)
    return f"{device.type}{device.index}"
