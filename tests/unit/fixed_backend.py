"""A backend of choices with planned behaviour, put in the place of the real ones by ``install``."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence

import pytest
from fake_choices import fake

from gemmtune.choice import Availability, Choice, Offers, Refusal
from gemmtune.device import DeviceInfo
from gemmtune.problem import Problem
from gemmtune.selector import offers
from gemmtune.settings import Settings


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
    """Let ``backend`` be the only source of choices; torch stays reachable as the fallback."""
    absent = types.SimpleNamespace(serves_by_default=lambda device: False)
    monkeypatch.setattr(offers, "load", lambda name: backend if name == "triton" else absent)
