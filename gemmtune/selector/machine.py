"""The measured limits of this machine, kept in the store so that they are measured once."""

from __future__ import annotations

from ..device import DeviceInfo
from ..problem import Problem
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store
from ..timing.limits import limit_names
from .progress import Progress
from .remote import open_session

__all__ = ["ensure_limits", "limits_of"]

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
    with open_session(problem, device, settings) as session:
        store.put_limits(fingerprint_text(device, TIMING), session.limits(known))
    progress.stage("limits of this machine", 1, 1)
