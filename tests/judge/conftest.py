"""Processes for untrusted GEMMs of all tests of this folder: each start imports torch, so they live as long as the run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from gemmtune.judging.calls import timed_calls
from gemmtune.judging.levels import LEVELS
from gemmtune.untrusted.process import close_all

LEAST = dataclasses.replace(LEVELS["brief"], cases=4, small_calls=8, named_shapes=0, largest=5, profiled=1)
"""Level for tests of reports and processes, which catches little."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a brief judgement make few calls, of small operands."""
    monkeypatch.setattr("gemmtune.judging.calls.DEEP", (range(8, 9), range(8, 9), range(512, 513)))
    monkeypatch.setattr("gemmtune.judging.calls.DECODING", (range(2, 3), range(200, 201), range(512, 513)))
    monkeypatch.setattr("gemmtune.judging.verdict.LEVELS", {**LEVELS, "brief": LEAST})


@pytest.fixture
def one_shape(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it end after the calls of one shape, in which all processes take part."""
    monkeypatch.setattr("gemmtune.judging.verdict.timed_calls", lambda *options: itertools.islice(timed_calls(*options), 1))


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    yield
    close_all()
