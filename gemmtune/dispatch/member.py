"""Choices of a table or of tuned Ms, found, loaded and bound when they are needed."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..choice import Choice, Kernel
from ..device import DeviceInfo, made_current
from ..errors import GemmtuneError, UnavailableError
from ..problem import Problem
from ..problem.rows import RowClass
from ..selector.segments import Segment, Table

Find = Callable[[Problem], Choice | str]
"""Function that returns a member's choice at its sampled M, or the reason why the choice no longer exists."""


class Member:
    """A choice for several M, found when first needed by its sampled M, loaded once for each kernel and bound for each M."""

    def __init__(self, rows_class: RowClass, sampled_m: int, device: DeviceInfo, find: Find) -> None:
        self.sampled_m = sampled_m
        self._class = rows_class
        self._device = device
        self._find = find
        self._choice: Choice | str | None = None
        self._loaded: dict[str | None, Any] = {}
        self._runs: dict[int, tuple[Choice, Any]] = {}

    @property
    def choice(self) -> Choice | str:
        """The choice at its sampled M, or the reason why it no longer exists."""
        if self._choice is None:
            self._choice = self._find(self._class.at(self.sampled_m))
        return self._choice

    @property
    def found(self) -> bool:
        """True if the choice still exists."""
        return isinstance(self.choice, Choice)

    def bound(self, problem: Problem) -> tuple[Choice, Kernel] | str:
        """Return the choice and kernel for a problem of the class, or the reason why there is none."""
        at = self._at(problem)
        if isinstance(at, str):
            return at
        try:
            with made_current(self._device.gpu):
                return at, at.bind(self._loaded_for(at))
        except (GemmtuneError, RuntimeError, OSError) as error:
            return f"{at.name} cannot be loaded ({type(error).__name__}: {error})"

    def load(self, rows: Sequence[int]) -> None:
        """Load the kernels of these M now, since a captured CUDA graph cannot. A failure is reported when the kernel is needed."""
        with contextlib.suppress(GemmtuneError, RuntimeError, OSError), made_current(self._device.gpu):
            for m in rows:
                at = self._at(self._class.at(m))
                if isinstance(at, Choice):
                    self._runs[m] = (at, self._loaded_for(at))

    def proved(self, problem: Problem, start: int) -> tuple[Choice, Kernel] | None:
        """Return the kernel for a problem in the proved run of M from ``start`` on, or None if it is not loaded."""
        run = self._runs.get(start)
        at = run[0].proved_at(problem, self._device) if run is not None else None
        return (at, at.bind(run[1])) if run is not None and isinstance(at, Choice) else None

    def ready_at(self, start: int) -> bool:
        return start in self._runs

    def _at(self, problem: Problem) -> Choice | str:
        choice = self.choice
        return choice if isinstance(choice, str) else choice.at(problem, self._device)

    def _loaded_for(self, at: Choice) -> Any:
        key = at.compile_key
        if key not in self._loaded:
            if not at.compiled:
                raise UnavailableError(f"it is not compiled for {at.problem}; tune the range again")
            self._loaded[key] = at.load()
        return self._loaded[key]


def members_of(
    table: Table, rows_class: RowClass, device: DeviceInfo, found: Callable[[Segment, Problem], Choice | None]
) -> list[Member]:
    """Return a member for each segment of a table. Segments with one choice share it. ``found`` looks it up at the sampled M."""

    def choice_of(x: Segment, problem: Problem) -> Choice | str:
        gone = f"{x.name} is not among the choices for {problem}: the settings leave it out, or another version measured it"
        return found(x, problem) or gone

    made: dict[tuple[str, int], Member] = {}
    for x in table.segments:
        made.setdefault((x.content_hash, x.sampled_m), Member(rows_class, x.sampled_m, device, functools.partial(choice_of, x)))
    return [made[x.content_hash, x.sampled_m] for x in table.segments]
