"""How many processes it takes: one batch for all, a second one for what the first leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .processes import Failed
from .sampling import ProcessSample
from .statistics import Judgement, Verdict

__all__ = ["Process", "Series", "collect"]

M = TypeVar("M")
Process = Callable[[Sequence[M], int], list[ProcessSample | Failed]]
"""``process(matches, turn)`` measures the matches in a fresh process, a result for each; ``turn`` counts the calls."""


@dataclass(slots=True)
class Series:
    """What was measured of one match: its batches of processes; or why it was not."""

    batches: list[list[ProcessSample]]
    failure: str = ""

    @property
    def samples(self) -> list[ProcessSample]:
        """What every process of every batch found."""
        return [sample for batch in self.batches for sample in batch]

    @property
    def values(self) -> list[list[float]]:
        """The log ratios, by batch."""
        return [[sample.log_ratio for sample in batch] for batch in self.batches]


def collect(
    matches: Sequence[M],
    process: Process[M],
    judge: Callable[[int, Series], Judgement],
    *,
    processes: int,
    whole: bool,
    tell: Callable[[str], None],
) -> list[Series]:
    """Measure in a batch of ``processes``, and in a second one those that ``judge(index, series)`` finds inconclusive (or all).

    ``whole`` asks for two batches of all. What fails in one process is left out of those that follow. ``tell`` is given a line for
    each process.
    """
    found = [Series([]) for _ in matches]
    for batch in (1, 2):
        open_ = [
            i
            for i, series in enumerate(found)
            if not series.failure and (batch == 1 or whole or judge(i, series).verdict is Verdict.INCONCLUSIVE)
        ]
        for i in open_:
            found[i].batches.append([])
        for number in range(processes):
            playing = [i for i in open_ if not found[i].failure]
            if not playing:
                break
            tell(f"batch {batch}, process {number + 1} of {processes}: {len(playing)} problem{'s' * (len(playing) > 1)}")
            turn = (batch - 1) * processes + number
            for i, result in zip(playing, process([matches[i] for i in playing], turn), strict=True):
                if isinstance(result, Failed):
                    found[i].failure = result.reason
                else:
                    found[i].batches[-1].append(result)
    return found
