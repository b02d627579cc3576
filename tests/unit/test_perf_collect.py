"""Processes of a gate: early ends, second batches, failures."""

from __future__ import annotations

from collections.abc import Sequence

from gemmtune.perf_gate.sampling import ProcessSample, Series, collect
from gemmtune.perf_gate.statistics import Decision, Judgement, Rule, judge


class Script:
    """Fake processes that return each match's number plus a little noise, and record their arguments."""

    def __init__(self, failing: dict[float, int] | None = None) -> None:
        self.asked: list[tuple[tuple[float, ...], int]] = []
        self.failing = failing or {}

    def __call__(self, matches: Sequence[float], turn: int) -> list[ProcessSample | str]:
        self.asked.append((tuple(matches), turn))
        noise = 0.001 * (turn % 3)
        return [
            "out of memory"
            if self.failing.get(match, 99) <= turn
            else ProcessSample(log_ratio=match + noise, candidate_us=1.0, reference_us=1.0, blocks=30)
            for match in matches
        ]


def run(script: Script, matches: list[float], *, whole: bool = False) -> tuple[list[Series], list[str]]:
    told: list[str] = []

    def judged(_index: int, series: Series) -> Judgement:
        return judge(series.values, Rule())

    return collect(matches, script, judged, processes=3, whole=whole, tell=told.append), told


def test_matches_decided_by_the_first_batch_are_not_measured_again():
    script = Script()
    found, told = run(script, [0.0, 0.1])
    assert script.asked == [((0.0, 0.1), turn) for turn in (0, 1, 2)] + [((0.1,), turn) for turn in (3, 4, 5)]
    assert [len(series.batches) for series in found] == [1, 2]
    assert judge(found[1].values, Rule()).decision is Decision.REGRESSED
    assert told[0] == "batch 1, process 1 of 3: 2 problems"
    assert told[-1] == "batch 2, process 3 of 3: 1 problem"


def test_whole_requests_two_batches_of_all():
    found, _ = run(Script(), [0.0], whole=True)
    assert found[0].values == [[0.0, 0.001, 0.002], [0.0, 0.001, 0.002]]


def test_a_failing_match_is_left_out_with_its_reason():
    script = Script(failing={0.1: 1})
    found, _ = run(script, [0.1, 0.0])
    assert found[0].failure == "out of memory"
    assert found[1].failure == ""
    assert [asked for asked, _ in script.asked] == [(0.1, 0.0), (0.1, 0.0), (0.0,)]


def test_nothing_is_started_when_all_have_failed():
    script = Script(failing={0.1: 0})
    run(script, [0.1])
    assert len(script.asked) == 1
