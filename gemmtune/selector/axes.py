"""Search for choices that no backend lists: points along the axes of the fastest choices, found by ``minimize``."""

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
"""Maximum distance of a point from the best one, in steps along one or two axes."""
Try = Callable[[Choice, Choice], Outcome]
"""``try_one(choice, origin)``: measure a choice that the search reached from ``origin``, and keep the outcome."""
Ready = Callable[[Sequence[Choice]], None]
"""Compile choices concurrently."""


def origins(candidates: Candidates, outcomes: Mapping[str, Outcome]) -> list[Choice]:
    """Return the fastest choice of each template that has axes, if its time is near the fastest of all."""
    effort, ranked = EFFORT[candidates.settings.search], right(outcomes.values())
    found: dict[tuple[str, object], Choice] = {}
    for outcome in ranked if effort.axis_points else ():
        choice = candidates.choices[outcome.content_hash]
        if (outcome.time_us or 0.0) <= effort.axis_near * (ranked[0].time_us or 0.0) and choice.axes:
            found.setdefault((choice.backend, choice.info.get("template")), choice)
    return list(found.values())


def search_axes(origin: Choice, candidates: Candidates, outcomes: Mapping[str, Outcome], try_one: Try, ready: Ready) -> None:
    """Measure points along the axes of ``origin`` until no neighbour of the best is better, or the budget of points is used up."""
    walk = _Walk(origin, candidates, outcomes, try_one, ready)
    minimize(walk.time_us, origin.parameters, walk.step, max_step=STEPS)


class _Walk:
    """One search and its budget of points. Each point is a choice that passes the filters of the settings."""

    def __init__(self, origin: Choice, candidates: Candidates, outcomes: Mapping[str, Outcome], try_one: Try, ready: Ready) -> None:
        self._origin = origin
        self._candidates = candidates
        self._outcomes = outcomes
        self._try = try_one
        self._ready = ready
        self._left = EFFORT[candidates.settings.search].axis_points
        self._best: tuple[float, Parameters] = (float("inf"), origin.parameters)

    def step(self, name: str, value: int, direction: int, _: Parameters) -> int:
        """Return the value ``direction`` places further on its axis, or the end of the axis."""
        axis = sorted({*self._origin.axes[name], value})
        return axis[min(max(axis.index(value) + direction, 0), len(axis) - 1)]

    def time_us(self, parameters: Parameters) -> float:
        """Return the time at a point. Raise GemmtuneError if it has none."""
        choice = self._choice(parameters)
        if isinstance(choice, str):
            raise GemmtuneError(choice)
        outcome = self._outcomes.get(choice.content_hash)
        if outcome is None:
            if self._left <= 0 or self._candidates.late:
                raise GemmtuneError("the search has used up its points or its time")
            if not choice.compiled:
                self._compile()
            if self._candidates.late:
                raise GemmtuneError("the search has used up its time")
            self._left -= 1
            outcome = self._try(choice, self._origin)
        if outcome.status is not Status.OK or outcome.time_us is None:
            raise GemmtuneError(f"{outcome.status}: {outcome.reason}")
        self._best = min(self._best, (outcome.time_us, dict(parameters)), key=lambda x: x[0])
        return outcome.time_us

    def _compile(self) -> None:
        """Compile the points around the best one concurrently: the search may measure them next."""
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
