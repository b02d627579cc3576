"""A backend of choices with planned behaviour, put in the place of the real ones by ``install``."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence

import pytest
from fake_choices import Fake, fake

from gemmtune.choice import Availability, Choice, Kernel, Offers, Refusal
from gemmtune.device import DeviceInfo
from gemmtune.problem import Problem
from gemmtune.selector import offers
from gemmtune.settings import Settings
from gemmtune.timing.contenders import KernelContender
from gemmtune.timing.timer import Timer

TIME_US = {"slow": 2000.0}
"""Times in µs of what fakes run, so that ranks do not depend on other work of the machine. Others take USUAL_US."""
USUAL_US = 50.0


class FixedBackend:
    """Offers a fake for each of ``kinds`` (what it runs, and anything behind a hyphen), which a test may change between calls."""

    name = "triton"

    def __init__(self, kinds: Sequence[str], refusals: Sequence[Refusal] = ()) -> None:
        self.kinds = list(kinds)
        self.refusals = list(refusals)
        self.enumerations = 0

    def available(self, device: DeviceInfo) -> Availability:
        return Availability(ok=True, detail="always")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return True

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        self.enumerations += 1
        choices: list[Choice] = [
            dataclasses.replace(fake(kind, problem, run=kind.split("-")[0]), backend="triton") for kind in self.kinds
        ]
        return Offers(choices=choices, refusals=self.refusals)


def install(monkeypatch: pytest.MonkeyPatch, backend: FixedBackend) -> None:
    """Let ``backend`` be the only source of choices, with fixed times in this process. torch stays reachable as the fallback."""
    absent = types.SimpleNamespace(serves_by_default=lambda device: False)
    monkeypatch.setattr(offers, "load", lambda name: backend if name == "triton" else absent)
    original = Timer.contender

    def contender(self: Timer, choice: Choice, kernel: Kernel) -> KernelContender:
        made = original(self, choice, kernel)
        if isinstance(choice, Fake):
            made.rough_us = TIME_US.get(choice.run, USUAL_US)
            monkeypatch.setattr(made, "result_us", lambda: made.rough_us)
        return made

    monkeypatch.setattr(Timer, "contender", contender)
