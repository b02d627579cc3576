"""Search along the axes of a few parameters whose ranges are too long for a table of configs."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import GemmtuneError

Parameters = Mapping[str, int]
Step = Callable[[str, int, int, Parameters], int]
"""``step(name, value, direction, parameters)``: the value that many steps up or down; ``value`` itself if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The result of ``minimize``. ``speedup`` is the reference's value divided by this one, at least 1.

    ``tried`` maps every point, as values in the order of sorted names, to its value or to why it has none. ``slopes`` has for each
    parameter the worst tried ratio to the minimum one step away.
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
    """Return parameters that minimize ``target``, starting from ``initial``.

    The search tries all vectors of steps whose lengths add up to at most ``max_step``, short ones first. It restarts from the first
    better point. Among points within ``noise`` of the least value it takes ``initial``, or else the one with the smallest
    parameters. Repeated measurements then give one answer. The result is never worse than ``reference``.

    Args:
        target: a positive value such as a time in µs. A point is rejected if this raises or returns no positive number.
        reference: the start if ``initial`` fails, and the baseline of the result; ``initial`` unless given.

    Raises:
        GemmtuneError: neither ``initial`` nor ``reference`` has a value, they have different parameters, or ``noise`` is negative.
    """
    if noise < 0:
        raise GemmtuneError(f"minimize: noise: got {noise}, expected a share of the least value, 0 or more")
    reference = initial if reference is None else reference
    if sorted(initial) != sorted(reference):
        raise GemmtuneError(f"minimize: got names {sorted(initial)} and a reference with {sorted(reference)}, expected equal ones")
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
    """The points tried so far."""

    def __init__(self, target: Callable[[dict[str, int]], float], names: tuple[str, ...]) -> None:
        self._target = target
        self.names = names
        self.tried: dict[tuple[int, ...], float | str] = {}

    def key(self, parameters: Parameters) -> tuple[int, ...]:
        return tuple(parameters[name] for name in self.names)

    def value(self, parameters: Parameters) -> float | None:
        """Return the target at a point, evaluated once. None if it failed."""
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
        """Return the first untried neighbour that is better than ``here``, which has a value. None if there is none."""
        for there in neighbours(here, step, max_step):
            if self.key(there) in self.tried:
                continue
            value, best = self.value(there), self.value(here)
            if value is not None and best is not None and value < best:
                return there
        return None

    def stable(self, initial: Parameters, noise: float) -> tuple[dict[str, int], float]:
        """Return the initial point if it ties with the best; otherwise the tied point with the smallest parameters."""
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
    """Yield the points to try from ``here``, in order."""
    names = tuple(sorted(here))
    vectors = itertools.product(range(-max_step, max_step + 1), repeat=len(names))
    for vector in sorted((v for v in vectors if 0 < _length(v) <= max_step), key=lambda v: (_length(v), v)):
        there = _moved(here, names, vector, step)
        if there is not None:
            yield there


def _moved(here: Parameters, names: tuple[str, ...], vector: tuple[int, ...], step: Step) -> dict[str, int] | None:
    """Return the point that many steps away. None if a parameter reaches its end first."""
    there = dict(here)
    for name, direction in zip(names, vector, strict=True):
        if direction:
            there[name] = step(name, here[name], direction, here)
            if there[name] == here[name]:
                return None
    return there


def _length(vector: tuple[int, ...]) -> int:
    return sum(map(abs, vector))
