"""What a tuning asks its processes for, and how long each of its stages takes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from gemmtune.problem import Problem
from gemmtune.selector.precompile import Compilation
from gemmtune.selector.progress import Progress
from gemmtune.selector.remote import RemoteSession
from gemmtune.selector.result import ProblemResult
from gemmtune.selector.session import Session

__all__ = ["Stages", "counted"]


class Stages(Progress):
    """Seconds by stage: those until something else moves belong to the stage that was told last."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._since = "before", time.perf_counter()

    def _moved(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] = round(self.seconds.get(self._stage, 0.0) + now - self._since, 2)
        self._stage, self._since = stage, now

    def begin(self, problem: Problem, total_problems: int) -> None:  # noqa: ARG002 - that it begins is all that counts
        """A problem starts."""
        self._moved("begin")

    def stage(self, name: str, done: int, total: int) -> None:  # noqa: ARG002 - how far it is does not matter
        """Something moved."""
        self._moved(name)

    def end(self, result: ProblemResult) -> None:  # noqa: ARG002
        """The problem begun last has its result."""
        self._moved("between problems")

    def close(self) -> None:
        """The tuning is over."""
        self._moved("over")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts, while the block runs: kernels that are compiled, sessions on the device, and what is examined, proved and ranked in
    them, whichever process that is in."""
    counts: Counter[str] = Counter(compilations=0)
    watched = [(Compilation, "_compile", "compilations")]
    for session in (Session, RemoteSession):
        watched += [(session, "__enter__", "sessions"), (session, "examine", "examined"), (session, "rank", "ranked")]
        watched += [(session, "prove", "proved")]
    with contextlib.ExitStack() as stack:
        for owner, name, label in watched:
            stack.enter_context(mock.patch.object(owner, name, _counting(getattr(owner, name), label, counts)))
        yield counts


def _counting(original: Callable[..., Any], label: str, counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[label] += 1
        return original(*args, **kwargs)

    return counting
