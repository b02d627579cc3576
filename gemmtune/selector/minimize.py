"""A search along the axes of a few parameters, for those with long axes on which a table of configs has no place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import GemmtuneError

Parameters = Mapping[str, int]
Step = Callable[[str, int, int, Parameters], int]
"""``step(name, value, direction, parameters)``: the value so many steps up or down; ``value`` itself where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """What ``minimize`` found.

    ``speedup`` is the reference's value over this one, at least 1. ``tried`` has every point by its values in the order of sorted
    names: its value, or why it has none. ``slopes`` has for each parameter the worst ratio to the minimum one step away, as far as
    that was tried.
    """

    parameters: dict[str, int]
    value: float
    speedup: float
    tried: dict[tuple[int, ...], float | str]
    slopes: dict[str, float]


def minimize(
    target: Callable[[dict[str, int]], float],
    initial: Parameters,
    step: Step,
    *,
    reference: Parameters | None = None,
    max_step: int = 2,
    noise: float = 1e-3,
) -> Minimum:
    """Find parameters for which ``target`` is least, starting from ``initial``.

    All vectors of steps whose lengths add up to ``max_step`` at most are tried, short ones first; from the first better point the
    search begins anew. Of the points within ``noise`` of the least value, ``initial`` is taken, or the one with the least values
    of its parameters: what is measured twice then gives one answer. The result is never worse than ``reference``.

    Args:
        target: such as a time in µs, positive. What it raises makes a point that is not taken, as does what is no positive number.
        reference: where to start if ``initial`` fails, and what the result is compared with; ``initial`` unless given.

    Raises:
        GemmtuneError: neither ``initial`` nor ``reference`` has a value, they have different parameters, or ``noise`` is negative.
    """
    if noise < 0:
        raise GemmtuneError(f"minimize: noise: got {noise}, expected a share of the least value, 0 or more")
    reference = initial if reference is None else reference
    if sorted(initial) != sorted(reference):
        raise GemmtuneError(f"minimize: got parameters {sorted(initial)}, and {sorted(reference)} of the reference")
    search = _Search(target, tuple(sorted(initial)))
    before = search.value(reference)
    here = initial if search.value(initial) is not None else reference
    if search.value(here) is None:
        raise GemmtuneError(f"minimize: neither start has a value: {search.tried[search.key(initial)]}")
    better: Parameters | None = here
    while better is not None:
        better = search.better(better, step, max_step)
    chosen, least = search.stable(initial, noise)
    if before is not None and least > before:
        chosen, least = dict(reference), before
    return Minimum(
        parameters=chosen,
        value=least,
        speedup=1.0 if before is None else before / least,
        tried=search.tried,
        slopes={name: search.slope(chosen, name, step) for name in search.names},
    )


class _Search:
    """The points that were tried."""

    def __init__(self, target: Callable[[dict[str, int]], float], names: tuple[str, ...]) -> None:
        self._target = target
        self.names = names
        self.tried: dict[tuple[int, ...], float | str] = {}

    def key(self, parameters: Parameters) -> tuple[int, ...]:
        return tuple(parameters[name] for name in self.names)

    def value(self, parameters: Parameters) -> float | None:
        """The target there, asked once; None where it failed."""
        key = self.key(parameters)
        if key not in self.tried:
            try:
                found = float(self._target(dict(parameters)))
                self.tried[key] = found if 0 < found < math.inf else f"got {found}, expected a finite positive number"
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a fact about it, kept with its type
                self.tried[key] = f"{type(error).__name__}: {error}"
        value = self.tried[key]
        return value if isinstance(value, float) else None

    def better(self, here: Parameters, step: Step, max_step: int) -> dict[str, int] | None:
        """The first new point that near that is better than ``here``, which has a value; None if none is."""
        for there in neighbours(here, step, max_step):
            if self.key(there) in self.tried:
                continue
            value, best = self.value(there), self.value(here)
            if value is not None and best is not None and value < best:
                return there
        return None

    def stable(self, initial: Parameters, noise: float) -> tuple[dict[str, int], float]:
        """The initial point if it is as good as the best, else the one with the least values among those that are."""
        values = {key: value for key, value in self.tried.items() if isinstance(value, float)}
        least = min(values.values())
        alike = [key for key, value in values.items() if value <= least * (1 + noise)]
        key = self.key(initial) if self.key(initial) in alike else min(alike)
        return dict(zip(self.names, key, strict=True)), values[key]

    def slope(self, chosen: Parameters, name: str, step: Step) -> float:
        here = self.value(chosen)
        ratios = [1.0]
        for direction in (-1, 1):
            value = self.tried.get(self.key({**chosen, name: step(name, chosen[name], direction, chosen)}))
            if isinstance(value, float) and here:
                ratios.append(value / here)
        return max(ratios)


def neighbours(here: Parameters, step: Step, max_step: int) -> Iterator[dict[str, int]]:
    """The points that are tried from ``here``, in their order."""
    names = tuple(sorted(here))
    for vector in _vectors(len(names), max_step):
        there = _moved(here, names, vector, step)
        if there is not None:
            yield there


def _moved(here: Parameters, names: tuple[str, ...], vector: tuple[int, ...], step: Step) -> dict[str, int] | None:
    """The point that many steps away; None where some parameter ends before."""
    there = dict(here)
    for name, direction in zip(names, vector, strict=True):
        if direction:
            there[name] = step(name, here[name], direction, here)
            if there[name] == here[name]:
                return None
    return there


def _vectors(count: int, max_step: int) -> list[tuple[int, ...]]:
    """All vectors of steps with lengths that add up to 1 to ``max_step``, short ones first."""
    axis = range(-max_step, max_step + 1)
    return sorted((v for v in itertools.product(axis, repeat=count) if 0 < _length(v) <= max_step), key=lambda v: (_length(v), v))


def _length(vector: tuple[int, ...]) -> int:
    return sum(map(abs, vector))
