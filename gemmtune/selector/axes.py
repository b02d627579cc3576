"""Choices that no backend lists: those that lie along the axes of the fastest ones, found by ``minimize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..backends.table import TEMPLATES
from ..choice import Choice, Offers, Status
from ..effort import EFFORT
from ..errors import GemmtuneError
from ..filters import filtered, uncapped
from .candidates import Candidates
from .minimize import Parameters, minimize, neighbours
from .pick import right
from .result import Outcome

STEPS = 2
"""How many steps, along one axis or two, a point may be away from the best one known."""
Try = Callable[[Choice, Choice], Outcome]
"""``try_one(choice, origin)``: measure what was come to from ``origin``, and keep the outcome."""
Ready = Callable[[Sequence[Choice]], None]
"""Compile choices at the same time."""


def origins(candidates: Candidates, outcomes: Mapping[str, Outcome]) -> list[Choice]:
    """The fastest choice of each template that has axes, where it is near the fastest of all."""
    effort, ranked = EFFORT[candidates.settings.search], right(outcomes.values())
    found: dict[tuple[str, object], Choice] = {}
    for outcome in ranked if effort.axis_points else ():
        choice = candidates.choices[outcome.content_hash]
        if (outcome.time_us or 0.0) <= effort.axis_near * (ranked[0].time_us or 0.0) and choice.axes:
            found.setdefault((choice.backend, choice.info.get("template")), choice)
    return list(found.values())


def search_axes(origin: Choice, candidates: Candidates, outcomes: Mapping[str, Outcome], try_one: Try, ready: Ready) -> None:
    """Measure points along the axes of ``origin`` until none near the best is better, or the search has had its points."""
    walk = _Walk(origin, candidates, outcomes, try_one, ready)
    minimize(walk.time_us, origin.parameters, walk.step, max_step=STEPS)


class _Walk:
    """The points of one search: as many as the effort has, each a choice that the settings let pass."""

    def __init__(self, origin: Choice, candidates: Candidates, outcomes: Mapping[str, Outcome], try_one: Try, ready: Ready) -> None:
        self._origin = origin
        self._candidates = candidates
        self._outcomes = outcomes
        self._try = try_one
        self._ready = ready
        self._left = EFFORT[candidates.settings.search].axis_points
        self._best: tuple[float, Parameters] = (float("inf"), origin.parameters)

    def step(self, name: str, value: int, direction: int, _: Parameters) -> int:
        """The value so many places further on its axis, or at the end of it."""
        axis = sorted({*self._origin.axes[name], value})
        return axis[min(max(axis.index(value) + direction, 0), len(axis) - 1)]

    def time_us(self, parameters: Parameters) -> float:
        """The time at a point. Raises GemmtuneError where there is none."""
        choice = self._choice(parameters)
        if isinstance(choice, str):
            raise GemmtuneError(choice)
        outcome = self._outcomes.get(choice.content_hash)
        if outcome is None:
            if self._left <= 0:
                raise GemmtuneError("the search has had its points")
            if not choice.compiled:
                self._compile()
            self._left -= 1
            outcome = self._try(choice, self._origin)
        if outcome.status is not Status.OK or outcome.time_us is None:
            raise GemmtuneError(f"{outcome.status}: {outcome.reason}")
        self._best = min(self._best, (outcome.time_us, dict(parameters)), key=lambda x: x[0])
        return outcome.time_us

    def _compile(self) -> None:
        """What may be asked for next, at the same time: the points around the best one."""
        around = (self._choice(point) for point in neighbours(self._best[1], self.step, STEPS))
        wanted = [x for x in around if isinstance(x, Choice) and x.content_hash not in self._outcomes and not x.compiled]
        self._ready(wanted[: self._left])

    def _choice(self, parameters: Parameters) -> Choice | str:
        if dict(parameters) == dict(self._origin.parameters):
            return self._origin
        made = self._origin.moved(parameters, self._candidates.device)
        if isinstance(made, str):
            return made
        passed = filtered(Offers(choices=(made,)), uncapped(self._candidates.settings), templates=TEMPLATES)
        return passed.choices[0] if passed.choices else passed.refusals[0].reason
