"""A GEMM that deceives the worker in which it is measured never becomes the pick."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.choice import Status
from gemmtune.selector import walls
from gemmtune.untrusted.process import close_all

HERE = str(Path(__file__).parent)
DECEIVING = ("forges_the_worker", "fast_among_choices", "stale_after_thirty")


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(HERE)
    yield
    walls._known.clear()
    close_all()
    for name in [name for name in sys.modules if name.partition(".")[0] == "hacks"]:
        del sys.modules[name]


def tuned(*targets: str) -> gemmtune.TuningResult:
    with settings.patch(extra_choices=targets, backends=("aten",), busy="accept"):
        return gemmtune.tune("mm", torch.randn(96, 128), torch.randn(128, 112), progress=False)


def test_no_deceiving_gemm_is_picked() -> None:
    [result] = tuned(*(f"hacks.tuner:{name}" for name in DECEIVING))
    assert result.pick == "aten:mm"
    outcomes = {outcome.name: outcome for outcome in result.outcomes}
    forged, stale = outcomes["own:hacks.tuner:forges_the_worker"], outcomes["own:hacks.tuner:fast_among_choices"]
    assert forged.status is Status.DISHONEST
    assert "by a clock out of its reach" in forged.reason
    assert stale.status in (Status.DISHONEST, Status.OK)


def test_honest_gemm_passes() -> None:
    [result] = tuned("honest:product")
    (own,) = (outcome for outcome in result.outcomes if outcome.name == "own:honest:product")
    assert own.status is Status.OK, own.reason
