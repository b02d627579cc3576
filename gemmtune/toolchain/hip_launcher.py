"""Launches through HIP's module interface: a call is one look-up and ``hipModuleLaunchKernel``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ErrorFromChoice
from .hip import Hip, LoadedHipKernel
from .launcher import MOST_READY, filled
from .record import Record


class Ready(NamedTuple):
    """The complete arguments of a launch. ``kept`` only keeps the memory alive that they point to."""

    arguments: Any
    kept: object


class HipLauncher:
    """One record on one device: ``launch(stream, addresses, alpha, beta)`` launches it, from any thread."""

    def __init__(self, kernel: LoadedHipKernel, record: Record, refuse: Callable[[str], ErrorFromChoice]) -> None:
        self.kernel, self.record, self._refuse = kernel, record, refuse
        self._launch = kernel.driver.call.hipModuleLaunchKernel
        self._shape = (kernel.function, *record.grid, record.threads, 1, 1, record.shared_bytes)
        self._ready: dict[tuple[object, ...], Ready] = {}

    def launch(self, stream: int, addresses: tuple[int, ...], alpha: float, beta: float) -> None:
        """Launch on ``stream`` with ``addresses`` in the order of ``record``. Raise ErrorFromChoice if HIP refuses it."""
        key = (addresses, alpha, beta)
        ready = self._ready.get(key) or self._prepare(key, addresses, (alpha, beta))
        status = self._launch(*self._shape, stream, ready.arguments, None)
        if status:
            raise self._refuse(self.kernel.driver.message(status))

    def _prepare(self, key: tuple[object, ...], addresses: tuple[int, ...], scalars: tuple[float, float]) -> Ready:
        memory, start = filled(self.record, addresses, scalars)
        arguments = (ctypes.c_void_p * len(self.record.arguments))(*(start + offset for offset in self.record.arguments))
        if len(self._ready) >= MOST_READY:
            self._ready.clear()
        self._ready[key] = ready = Ready(arguments, memory)
        return ready


@functools.lru_cache(maxsize=512)
def loaded_hip_kernel(driver: Hip, path: Path, kernel: str, device: int) -> LoadedHipKernel:
    """Return the kernel of the code object at ``path``, loaded once on a device. Raise UnavailableError if HIP refuses it."""
    return driver.load(path.read_bytes(), kernel, device)
