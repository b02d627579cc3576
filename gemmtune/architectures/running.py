"""Verification of choices compiled for an architecture, on a GPU of that architecture or a newer one."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from ..device import DeviceInfo
from ..errors import UnavailableError
from ..problem import Problem
from ..selector.remote import RemoteSession
from ..selector.samples import Sample
from ..settings import Settings, current
from ..toolchain.compiled import CompiledChoice

FIRST_SPECIFIC = 90
"""Capability from which on kernels use instructions of one architecture only (``sm_90a``), which no newer one has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Way in which kernels of an architecture run on a device: ``native``, ``forward`` (the driver translates PTX), or None."""

    mode: Literal["native", "forward"] | None
    reason: str = ""
    """Reason for a mode of None."""


def how_to_run(arch: str, device: DeviceInfo | None) -> Way:
    """Return the way in which kernels compiled for ``arch`` run on ``device``, which is None without a GPU."""
    if device is None or device.type == "cpu":
        return Way(mode=None, reason=f"no GPU here: {arch} was compiled for and not run")
    if device.arch == arch:
        return Way(mode="native")
    if device.type == "hip" or not arch.startswith("sm"):
        return Way(mode=None, reason=f"{arch} on {device.name} ({device.arch}): HIP kernels run on one architecture only")
    capability = int(arch.removeprefix("sm"))
    if device.capability < capability:
        return Way(mode=None, reason=f"{device.name} is {device.arch}, which is older than {arch}")
    if capability >= FIRST_SPECIFIC:
        own = f"{arch} uses instructions of its own (PTX target sm_{capability}a), which run on {arch} alone"
        return Way(mode=None, reason=f"{device.name} is {device.arch}; {own}")
    return Way(mode="forward")


class Runner(AbstractContextManager["Runner"]):
    """Context manager that verifies choices in a worker process. A crash, a hang or an illegal access costs one choice."""

    def __init__(self, device: DeviceInfo, settings: Settings | None = None) -> None:
        self._device = device
        self._settings = dataclasses.replace(settings or current(), verify=True)
        self._problem: Problem | None = None
        self._session: RemoteSession | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, choice: CompiledChoice) -> Sample:
        """Build and verify a choice, from its PTX if the device is newer. An error of the kernel becomes the sample's status.

        It is CRASHED or TIMED_OUT if the worker dies. Consecutive choices of one problem share a session. Raises UnavailableError
        if the device cannot run kernels of this architecture.
        """
        way = how_to_run(choice.arch, self._device)
        if way.mode is None:
            raise UnavailableError(f"{choice.name}: {way.reason}")
        if self._session is None or self._problem != choice.problem:
            self.close()
            self._problem = choice.problem
            self._session = RemoteSession(choice.problem, self._device, self._settings)
        return self._session.prove(choice.forward() if way.mode == "forward" else choice)

    def close(self) -> None:
        """Free the operands of the last problem and return the worker."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
