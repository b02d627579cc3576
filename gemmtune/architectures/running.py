"""Choices that were compiled for an architecture, run and verified on a GPU of that architecture or a newer one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, Self

import torch

from ..choice import Status
from ..device import DeviceInfo
from ..errors import UnavailableError
from ..problem import Problem
from ..selector.remote import measuring_kind
from ..selector.session import failure_of
from ..selector.verify import Verdict, Verifier
from ..settings import Settings, current, use
from ..timing.conditions import conditions
from ..toolchain.compiled import CompiledChoice
from ..workers.pool import WORKERS
from ..workers.worker import Worker, WorkerCrashed, WorkerTimedOut

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
        self._settings = settings or current()
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, choice: CompiledChoice) -> Verdict:
        """Build and verify a choice, from its PTX if the device is newer. What the kernel raises becomes the verdict; CRASHED or
        TIMED_OUT where the worker did not survive. Choices of one problem are best neighbours.

        Raises:
            UnavailableError: kernels of this architecture cannot run on the device.
        """
        way = how_to_run(choice.arch, self._device)
        if way.mode is None:
            raise UnavailableError(f"{choice.name}: {way.reason}")
        if self._worker is None or not self._worker.alive:
            self._worker = WORKERS.take(measuring_kind(self._device))
        try:
            return self._worker.call(
                _verify, choice, self._device, way.mode, self._settings, timeout_s=self._settings.choice_timeout_s
            )
        except WorkerTimedOut as error:
            reason = f"{error.reason}; the limit is the setting choice_timeout_s"
            return Verdict(status=Status.TIMED_OUT, error_over_bound=0.0, reason=reason)
        except WorkerCrashed as error:
            return Verdict(status=Status.CRASHED, error_over_bound=0.0, reason=error.reason)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a fact about it, recorded with its type
            self._worker.close()  # after some errors every later call in that process fails as well
            status, reason = failure_of(error)
            return Verdict(status=status, error_over_bound=0.0, reason=reason)

    def close(self) -> None:
        """Free the operands of the last problem and give the worker back."""
        worker, self._worker = self._worker, None
        if worker is None or not worker.alive:
            return
        try:
            worker.call(_forget, timeout_s=self._settings.choice_timeout_s)
        except (WorkerCrashed, WorkerTimedOut):
            return
        WORKERS.give(measuring_kind(self._device), worker)


# The worker's side.


def _verify(choice: CompiledChoice, device: DeviceInfo, mode: Literal["native", "forward"], settings: Settings) -> Verdict:
    with use(settings), conditions(choice.problem, device):
        made = choice.forward() if mode == "forward" else choice
        return _verifier(choice.problem, device.torch_device).check(made, made.build())


@functools.lru_cache(maxsize=1)
def _verifier(problem: Problem, device: torch.device) -> Verifier:
    """The verifier of the last problem is kept: probes and references are shared by its choices."""
    return Verifier(problem, device)


def _forget() -> None:
    _verifier.cache_clear()
    torch.cuda.empty_cache()
