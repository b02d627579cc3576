"""Choices that declare no reduction, at the Ms where their bits were compared with those of a class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ..choice import Choice, Kernel
from ..device import DeviceInfo
from ..problem import Problem
from .range_work import Work
from .remote import open_session

MOST_OBSERVED = 4
"""Number of choices without a declaration that are compared with a class."""
MOST_CPU_FLOPS = 2**38
"""Operations that the comparison of one choice may take on a CPU, some seconds. The largest Ms are left out first."""
ROWS_OF_CALL = 256
"""Number of Ms compared within one time limit."""


@dataclass(frozen=True, kw_only=True)
class ObservedRows(Choice):
    """Choice that is legal only for ``rows``, the Ms at which its bits were compared."""

    inner: Choice = field(repr=False)
    rows: frozenset[int] = field(repr=False)

    @classmethod
    def of(cls, inner: Choice, rows: frozenset[int]) -> Self:
        shared: Mapping[str, Any] = {name: getattr(inner, name) for name in ("name", "backend", "problem", "claims", "info")}
        return cls(**shared, inner=inner, rows=rows)

    @property
    def content_hash(self) -> str:
        return self.inner.content_hash

    @property
    def compile_key(self) -> str | None:
        return self.inner.compile_key

    def load(self) -> Any:
        return self.inner.load()

    def bind(self, loaded: Any) -> Kernel:
        return self.inner.bind(loaded)

    def at(self, problem: Problem, device: DeviceInfo) -> Choice | str:
        """Return the inner choice at an M that was compared, or the reason why it is illegal."""
        if problem.m not in self.rows:
            return f"{self.name} declares no reduction, and its bits at M = {problem.m} are not known to be those of the class"
        return self.inner.at(problem, device)


def equal_rows(work: Work, whole: Choice, choice: Choice, rows: Sequence[int]) -> list[int]:
    """Return those Ms up to that of ``whole`` at which a choice has its bits."""
    compared = [m for m in rows if m <= whole.problem.m]
    if work.device.type == "cpu":
        flops, kept = 0, []
        for m in compared:
            flops += 2 * work.rows_class.at(m).flops
            if flops <= MOST_CPU_FLOPS:
                kept.append(m)
        compared = kept
    found: list[int] = []
    with open_session(whole.problem, work.device, work.settings) as session:
        for i in range(0, len(compared), ROWS_OF_CALL):
            work.progress.stage(f"compare bits of {choice.name}", i, len(compared))
            found += session.equal_rows(whole, choice, work.rows_class, compared[i : i + ROWS_OF_CALL])
    return found
