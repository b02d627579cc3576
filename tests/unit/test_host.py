"""What gemmtune's own work costs a warm call."""

from __future__ import annotations

import dataclasses

from tuning_results import FAST, TORCH, problem_result

from gemmtune.device import detect, preset
from gemmtune.dispatch.host import host_us
from gemmtune.selector.result import HOST_US
from gemmtune.settings import Settings


def test_a_look_up_is_counted_where_no_graph_replays_the_kernel() -> None:
    assert 0.1 < host_us(detect("cpu"), Settings()) < 1000
    assert host_us(detect("cpu"), Settings()) == host_us(detect("cpu"), Settings(timing="eager"))
    assert host_us(preset("sm90"), Settings()) == 0


def test_the_speed_up_is_that_of_the_call_over_torch_called_directly() -> None:
    fast, torch = (
        dataclasses.replace(o, time_us=time_us, info=o.info | {HOST_US: 5.0}) for o, time_us in ((FAST, 10.0), (TORCH, 20.0))
    )
    assert problem_result(fast, torch).speedup_over_torch == 1.5
