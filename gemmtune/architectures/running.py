"""Choices that were compiled for an architecture, run and verified on a GPU of that architecture or a newer one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, Self

from ..device import DeviceInfo
from ..errors import UnavailableError
from ..problem import Problem
from ..selector.remote import RemoteSession
from ..selector.samples import Sample
from ..settings import Settings, current
from ..toolchain.compiled import CompiledChoice

FIRST_SPECIFIC = 90
"""The capability from which on kernels use instructions of their own architecture (``sm_90a``), which no newer one has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How kernels of an architecture run on a device: ``native``, ``forward`` (the driver translates their PTX), or not at all."""

    mode: Literal["native", "forward"] | None
    reason: str = ""
    """Why not at all."""


def how_to_run(arch: str, device: DeviceInfo | None) -> Way:
    """How kernels compiled for ``arch`` can run on ``device``, None meaning that there is no GPU."""
    if device is None or device.type == "cpu":
        return Way(mode=None, reason=f"no GPU here: {arch} was compiled for and not run")
    if device.arch == arch:
        return Way(mode="native")
    if device.type == "hip" or not arch.startswith("sm"):
        return Way(mode=None, reason=f"{arch} on {device.name} ({device.arch}): kernels of HIP are for one architecture alone")
    capability = int(arch.removeprefix("sm"))
    if device.capability < capability:
        return Way(mode=None, reason=f"{device.name} is {device.arch}, which is older than {arch}")
    if capability >= FIRST_SPECIFIC:
        own = f"{arch} uses instructions of its own (PTX target sm_{capability}a), which run on {arch} alone"
        return Way(mode=None, reason=f"{device.name} is {device.arch}; {own}")
    return Way(mode="forward")


class Runner:
    """Builds and verifies choices in a worker process: a crash, a hang or an illegal access costs one choice. A context manager."""

    def __init__(self, device: DeviceInfo, settings: Settings | None = None) -> None:
        self._device = device
        self._settings = dataclasses.replace(settings or current(), verify=True)
        self._problem: Problem | None = None
        self._session: RemoteSession | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, choice: CompiledChoice) -> Sample:
        """Build and verify a choice, from its PTX if the device is newer. What the kernel raises becomes the sample's status;
        CRASHED or TIMED_OUT where the worker did not survive. Choices of one problem are best neighbours: they share a session.

        Raises:
            UnavailableError: kernels of this architecture cannot run on the device.
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
        """Free the operands of the last problem and give the worker back."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
