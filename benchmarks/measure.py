"""Paired measurements: in each round every contender is sampled once, in an order that is reversed each time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from calls import arguments, gemmtune_call, torch_call
from references import Reference

import gemmtune
from gemmtune.choice import Kernel
from gemmtune.device import DeviceInfo
from gemmtune.dispatch.plan import Plan
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Problem
from gemmtune.settings import Timing
from gemmtune.timing.contenders import Contender
from gemmtune.timing.timer import Timer, collection_paused, median_margin

__all__ = ["Comparison", "compare", "host_cost", "rounds"]

OURS = "gemmtune"
LEAST_ROUNDS = 10
HOST_CALLS = 2000
HOST_BLOCKS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Medians over the rounds. ``ratios`` are the reference's time over ours within a round, with half the 95% interval of their
    median: above 1 gemmtune is faster."""

    ours_us: float
    reference_us: Mapping[str, float]
    ratios: Mapping[str, tuple[float, float]]
    rounds: int


def compare(
    problem: Problem,
    device: DeviceInfo,
    plan: Plan,
    references: Mapping[str, Reference],
    regime: Timing,
    *,
    seconds: float,
    operands: Operands | None = None,
) -> Comparison:
    """Measure the plan's kernel (``graph`` on a GPU) or the public operation against the references in turn.

    A fifth of ``seconds`` is load without measuring, which brings a GPU to the clocks that it sustains. ``operands`` are random
    unless they are given.
    """
    timer = Timer(problem, device, regime, operands=operands)
    as_called = regime == "eager" or device.type == "cpu"
    ours = _public(problem, plan) if as_called and plan.choice.packed_format is None else plan.kernel
    contenders = {OURS: timer.contender(plan.choice, ours)}
    contenders |= {name: timer.contender(r.choice, r.kernel) for name, r in references.items()}
    with collection_paused():
        rounds(contenders, seconds / 5, least=1)
        times = rounds(contenders, seconds, least=LEAST_ROUNDS)
    ratios = {
        name: median_margin([theirs / mine for theirs, mine in zip(times[name], times[OURS], strict=True)]) for name in references
    }
    return Comparison(
        ours_us=statistics.median(times[OURS]),
        reference_us={name: statistics.median(times[name]) for name in references},
        ratios=ratios,
        rounds=len(times[OURS]),
    )


def rounds(contenders: Mapping[str, Contender], seconds: float, *, least: int) -> dict[str, list[float]]:
    """Rounds until ``seconds`` are over and each order has had its turn. All are begun before the first is waited for."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    deadline = time.perf_counter() + seconds
    count = 0
    while count < least or count % 2 or time.perf_counter() < deadline:
        for name in order:
            contenders[name].begin()
        for name in order:
            times[name].append(contenders[name].result_us())
        order.reverse()
        count += 1
    return times


def _public(problem: Problem, plan: Plan) -> Kernel:
    """The operation as a caller calls it, dispatch and allocation included."""
    return Kernel(run=plan.kernel.run, run_new=gemmtune_call(problem))


def host_cost(problem: Problem, device: DeviceInfo) -> dict[str, float]:
    """The host's cost of one warm call in µs, ours and torch's, and their ratio in one run: ours over torch's.

    Blocks of calls alternate. On a GPU nothing is waited for within a block; the problem must be so small that the GPU keeps up.
    """
    operands = random_operands(problem, device.torch_device, seed=1)
    if problem.op in ("mm", "bmm"):  # without the layer that gives other operations their arguments
        given, calls = (operands.a, operands.b), {OURS: getattr(gemmtune, problem.op), "torch": getattr(torch, problem.op)}
    else:
        given, calls = arguments(operands), {OURS: gemmtune_call(problem), "torch": torch_call(problem)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    with collection_paused():
        for block in range(HOST_BLOCKS + 1):
            for name in order:
                time_us = _block_us(calls[name], given, device)
                if block:
                    times[name].append(time_us)
            order.reverse()
    ratio, margin = median_margin([mine / theirs for mine, theirs in zip(times[OURS], times["torch"], strict=True)])
    return {
        "gemmtune_us": statistics.median(times[OURS]),
        "torch_us": statistics.median(times["torch"]),
        "ratio": ratio,
        "ratio_margin": margin,
    }


def _block_us(call: Callable[..., torch.Tensor], given: tuple[object, ...], device: DeviceInfo) -> float:
    if device.type != "cpu":
        torch.cuda.synchronize(device.torch_device)
    begun = time.perf_counter_ns()
    for _ in range(HOST_CALLS):
        call(*given)
    elapsed_ns = time.perf_counter_ns() - begun
    if device.type != "cpu":
        torch.cuda.synchronize(device.torch_device)
    return elapsed_ns / 1e3 / HOST_CALLS
