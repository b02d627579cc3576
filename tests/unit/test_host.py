"""What gemmtune's own work costs a warm call."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
from tuning_results import FAST, TORCH, problem_result

from gemmtune.device import detect, preset
from gemmtune.dispatch.host import BLOCKS, CALLS, host_us
from gemmtune.native.lookup import native
from gemmtune.selector.result import HOST_US
from gemmtune.settings import Settings


def test_a_look_up_is_counted_where_no_graph_replays_the_kernel() -> None:
    assert 0.1 < host_us(detect("cpu"), Settings()) < 1000
    assert host_us(detect("cpu"), Settings()) == host_us(detect("cpu"), Settings(timing="eager"))
    assert host_us(preset("sm90"), Settings()) == 0


def test_the_look_up_that_serves_is_the_one_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    python_us = host_us(detect("cpu"), Settings())
    module = ModuleType("look-up")
    module.__dict__["found"] = lambda *call: asked.append(call)
    monkeypatch.setattr(native, "module", module)
    assert host_us(detect("cpu"), Settings()) == python_us, "it is not in use"
    monkeypatch.setattr(native, "call", lambda *call: None)
    assert host_us(detect("cpu"), Settings(native=False)) == python_us
    assert not asked
    assert 0 < host_us(detect("cpu"), Settings()) < 1000
    assert (asked[0][0], len(asked)) == ("mm", BLOCKS * CALLS)
    assert host_us(preset("sm90"), Settings()) == 0


def test_the_speed_up_is_that_of_the_call_over_torch_called_directly() -> None:
    fast, torch = (
        dataclasses.replace(o, time_us=time_us, info=o.info | {HOST_US: 5.0}) for o, time_us in ((FAST, 10.0), (TORCH, 20.0))
    )
    assert problem_result(fast, torch).speedup_over_torch == 1.5
