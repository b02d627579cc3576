"""Comparison of the devices of a fleet that should be equal: the limits of each, measured twice."""

import statistics
from collections import defaultdict
from collections.abc import Mapping

import torch

from ..device import detect
from ..problem import Problem
from ..selector.remote import open_session
from ..settings import Settings, use

Limits = Mapping[str, tuple[float, float]]
"""Limits of a device by name, each measured twice."""

LEAST_NOISE = 0.04
"""Difference of a limit between equal devices that is always noise."""
OF_NOISE = 3.0
"""Difference that is more than noise, as a multiple of the largest difference of two measurements on one device."""


def measured_twice(place: str, settings: Settings) -> dict[str, tuple[float, float]]:
    """Measure the memory bandwidth and the rate of a bfloat16 product of a device twice. Takes some seconds."""
    device = detect(place)
    problem = Problem.mm(64, 64, 64, dtype=torch.bfloat16, device_type=device.torch_device.type)
    with use(settings), open_session(problem, device, settings) as session:
        first, second = (session.limits({})[0] for _ in range(2))
    return {name: (first[name], second[name]) for name in first.keys() & second.keys()}


def disagreements(devices: Mapping[str, tuple[str, Limits]]) -> list[str]:
    """Return a line for each device that is slower than its kind's median device, the faster of two, by more than noise."""
    found: list[str] = []
    by_kind: dict[tuple[str, str], dict[str, tuple[float, float]]] = defaultdict(dict)
    for name, (kind, limits) in devices.items():
        for limit, pair in limits.items():
            by_kind[kind, limit][name] = pair
    for (_, limit), pairs in by_kind.items():
        best = {name: max(pair) for name, pair in pairs.items()}
        usual = statistics.median_high(best.values())
        noise = max(abs(x - y) / max(x, y) for x, y in pairs.values())
        for name, value in best.items():
            if 1 - value / usual > max(LEAST_NOISE, OF_NOISE * noise):
                found.append(
                    f"{name}: got {limit} {value:.4g}, expected about {usual:.4g}, the median of {len(best)} equal devices: it is "
                    f"{100 * (1 - value / usual):.0f}% slower, more than noise; leave it out by --devices, or look what slows it"
                )
    return found
