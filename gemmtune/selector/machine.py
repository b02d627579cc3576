"""The measured limits of this machine, kept in the store so that they are measured once."""

from __future__ import annotations

import logging

from ..device import DeviceInfo
from ..problem import Problem
from ..settings import Settings
from .key import fingerprint_text
from .limits import limit_names, measure_limits
from .pool import WORKERS
from .progress import Progress
from .remote import measuring_kind
from .store import Store
from .worker import WorkerCrashed, WorkerTimedOut

__all__ = ["ensure_limits", "limits_of"]

log = logging.getLogger("gemmtune")
TIMING = "limits"
"""Stands where a measurement's fingerprint has its timing mode."""


def limits_of(device: DeviceInfo, store: Store) -> dict[str, float]:
    """What was measured of a device before."""
    return store.limits(fingerprint_text(device, TIMING))


def ensure_limits(problem: Problem, device: DeviceInfo, settings: Settings, store: Store, progress: Progress) -> None:
    """Measure the limits that concern a problem unless the store has them. Without them only the percentages are missing."""
    known = limits_of(device, store)
    if all(name in known for name in limit_names(problem.dtype_label)):
        return
    progress.stage("limits of this machine", 0, 1)
    try:
        found = _measured(problem, device, settings, known)
    except (WorkerCrashed, WorkerTimedOut, RuntimeError) as error:
        log.warning("the limits of this machine could not be measured: %s", error)
        return
    store.put_limits(fingerprint_text(device, TIMING), found)
    progress.stage("limits of this machine", 1, 1)


def _measured(problem: Problem, device: DeviceInfo, settings: Settings, known: dict[str, float]) -> dict[str, float]:
    if not settings.tune_in_subprocess:
        return measure_limits(device, problem.dtype_label, known)
    kind = measuring_kind(device)
    worker = WORKERS.take(kind)
    try:
        found: dict[str, float] = worker.call(measure_limits, device, problem.dtype_label, known, timeout_s=settings.choice_timeout_s)
    finally:
        WORKERS.give(kind, worker)
    return found
