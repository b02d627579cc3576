"""The part of a comparison of two installations that runs in the worker of each.

What is under test is the installation that the worker imports as ``gemmtune``: its settings, its tuning, its kernels. What measures
is this installation, which a worker with another one has under another name (``selector.workers.worker.ALIAS``): hence modules by
name, and plain values as arguments and results.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

from .. import problem as our_problems
from ..device import detect
from ..problem.rebuild import rebuilt
from ..settings import Timing
from ..timing.conditions import conditions
from ..timing.timer import GRAPH_US, Timer
from .sampling import Steady

__all__ = ["begin", "end", "introduce", "prepare", "sample_us"]

SAMPLE_US = 5000.0
"""Longer than within one process: the device has just done the other process's work."""

_open: list[tuple[Steady, contextlib.ExitStack]] = []


def introduce() -> tuple[str, str]:
    """(version, file) of the installation under test."""
    package = importlib.import_module("gemmtune")
    return package.__version__, str(package.__file__)


def prepare(data: Mapping[str, Any], device: str, changes: Mapping[str, Any]) -> str:
    """Tune a problem (as ``Problem.to_json`` gives it) unless that was done before; the name of the pick."""
    return str(_plan(data, device, changes).choice.name)


def begin(data: Mapping[str, Any], device: str, changes: Mapping[str, Any], timing: Timing) -> None:
    """Make the pick for a problem ready to be sampled."""
    end()
    problem, info = rebuilt(data, our_problems), detect(device)
    plan = _plan(data, device, changes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(conditions(problem, info))
        contender = Timer(problem, info, timing).contender(plan.choice, plan.kernel)
        steady = Steady(contender, SAMPLE_US, GRAPH_US)
        steady.sample_us()
        _open.append((steady, stack.pop_all()))


def sample_us() -> float:
    """One sample of what was begun. Another comes before it, unused, that brings caches, clocks and threads back from the other."""
    steady = _open[-1][0]
    steady.sample_us()
    return steady.sample_us()


def end() -> None:
    """Let go of what was begun."""
    while _open:
        _open.pop()[1].close()


def _plan(data: Mapping[str, Any], device: str, changes: Mapping[str, Any]) -> Any:
    problem = rebuilt(data, importlib.import_module("gemmtune.problem"))
    index = -1 if device == "cpu" else detect(device).index
    with importlib.import_module("gemmtune.settings").patch(**changes):
        return importlib.import_module("gemmtune.dispatch.plan").plan_for(problem, index)
