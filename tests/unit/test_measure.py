"""Measurement step by step: examined choices, entrants of the final rounds, and scaling between sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fake_choices import PROBLEM, Fake, fake

from gemmtune.choice import Choice, Offers, Status
from gemmtune.device import DeviceInfo, detect, preset
from gemmtune.effort import EFFORT
from gemmtune.errors import CompileError
from gemmtune.problem.rows import RowClass
from gemmtune.selector import candidates as trying
from gemmtune.selector import measure as measuring
from gemmtune.selector.accidents import WHILE_BUSY
from gemmtune.selector.candidates import Candidates, _reopened
from gemmtune.selector.finals import Measuring
from gemmtune.selector.measure import drift_since, examine_all, measure, outcome, rank
from gemmtune.selector.pick import pick
from gemmtune.selector.progress import Progress
from gemmtune.selector.range_work import Work
from gemmtune.selector.result import ALONE, DISTURBED, HOST_US, PLACE, SETTLED, Outcome
from gemmtune.selector.samples import Ranking, Sample, failure_of
from gemmtune.selector.trials import Trials
from gemmtune.settings import Settings
from gemmtune.timing import neighbours
from gemmtune.timing.rounds import Ranked
from gemmtune.tuning.explain import _trials
from gemmtune.workers.worker import GARBLED, NO_ANSWER

CPU = detect("cpu")
NAMES = ("torch", "a", "b", "c", "d")
CHOICES = {c.content_hash: c for c in (fake(name, baseline=name == "torch") for name in NAMES)}


def candidates(offered: Sequence[str] = NAMES, **fields: Any) -> Candidates:
    offers = Offers(choices=tuple(fake(name) for name in offered))
    values = {"problem": PROBLEM, "device": CPU, "settings": Settings(), "offers": offers, "choices": CHOICES, "known": {}}
    return Candidates(**(values | fields))


def known(name: str, time_us: float | None = None, *, finalist: bool = False, settled: bool = False, **fields: Any) -> Outcome:
    return Outcome(
        name=f"fake:{name}", backend="fake", content_hash=f"fake-fake:{name}", time_us=time_us, finalist=finalist,
        status=Status.WRONG_RESULT if time_us is None else Status.OK, baseline=name == "torch",
        info={SETTLED: True} if settled else {}, **fields,
    )  # fmt: skip


def by_hash(*outcomes: Outcome) -> dict[str, Outcome]:
    return {o.content_hash: o for o in outcomes}


class FakeSession:
    """Session with given times by name. It records its calls."""

    def __init__(self, **times: float | None) -> None:
        self.times = times
        self.spreads: dict[str, float] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.rechecked: list[list[str]] = []
        self.stale: set[str] = set()
        self.seen = ""

    def examine(self, choice: Choice, best_us: float | None) -> Sample:
        name = choice.name.removeprefix("fake:")
        self.asked.append((name, best_us))
        time_us = self.times[name]
        return Sample(status=Status.WRONG_RESULT if time_us is None else Status.OK, time_us=time_us)

    def recheck(self, choices: Sequence[Choice]) -> dict[str, Sample]:
        self.rechecked.append([c.name.removeprefix("fake:") for c in choices])
        stale = Sample(status=Status.WRONG_RESULT, reason="stale")
        return {c.name: stale for c in choices if c.name.removeprefix("fake:") in self.stale}

    def rank(self, choices: Sequence[Choice]) -> Ranking:
        names = [c.name.removeprefix("fake:") for c in choices]
        self.asked.append(tuple(names))
        times = {
            f"fake:{x}": Ranked(time_us=t, margin_us=t / 10, spread=self.spreads.get(x, 0.0))
            for x in names
            if (t := self.times[x]) is not None
        }
        failed = Sample(status=Status.CRASHED, reason="in the final rounds")
        return Ranking(times=times, seen=self.seen, failures={f"fake:{x}": failed for x in names if self.times[x] is None})


class Stages(Progress):
    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def stage(self, name: str, done: int, total: int) -> None:
        self.told.append((name, done, total))


def test_examines_against_the_best_so_far_and_corrects_drift() -> None:
    session, outcomes, progress = FakeSession(a=20.0, b=8.0, c=None, d=30.0), by_hash(known("torch", 5.0)), Stages()
    examine_all(Measuring(session, candidates(), outcomes, progress, drift=2.0), [CHOICES[f"fake-fake:{x}"] for x in "abcd"])
    assert session.asked == [("a", 10.0), ("b", 10.0), ("c", 8.0), ("d", 8.0)]
    assert [o.time_us for o in outcomes.values()] == [5.0, 10.0, 4.0, None, 15.0]
    assert progress.told == [("verify and measure", done, 4) for done in range(5)]
    first = FakeSession(a=20.0)
    examine_all(Measuring(first, candidates(), {}, progress, drift=2.0), [CHOICES["fake-fake:a"]])
    assert first.asked == [("a", None)]


@pytest.mark.parametrize(
    ("device", "timing", "compiled_at"),
    [(preset("sm90"), "graph", 1), (preset("sm90"), "eager", 0), (CPU, "graph", 0)],
    ids=["graph", "eager", "cpu"],
)
def test_measures_compiled_kernels_while_others_compile(
    device: DeviceInfo, timing: Any, compiled_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, offered = FakeSession(a=5.0, b=4.0), (fake("b", artifact="nowhere"), fake("a"))
    compiled: list[tuple[int, list[str]]] = []

    def precompile(choices: Sequence[Choice], settings: Settings, *_: object) -> dict[str, Sample]:
        compiled.append((len(session.asked), [c.name for c in choices]))
        return {}

    monkeypatch.setattr(measuring, "open_session", lambda *_: contextlib.nullcontext(session))
    monkeypatch.setattr(measuring, "precompile", precompile)
    choices = {c.content_hash: c for c in offered}
    found: dict[str, Outcome] = {}
    offers = Offers(choices=offered)
    measure(candidates(device=device, offers=offers, choices=choices, settings=Settings(timing=timing)), found, Progress())
    assert compiled[0] == (compiled_at, ["fake:b"] if compiled_at else ["fake:b", "fake:a"])
    assert [name for name, *_ in session.asked[:2]] == (["a", "b"] if compiled_at else ["b", "a"])
    assert {o.name: o.time_us for o in found.values()} == {"fake:a": 5.0, "fake:b": 4.0}


@pytest.mark.parametrize(
    ("times", "measured"),
    [
        ({"torch": 5.0, "a": 4.0, "b": 3.0}, ["b", "torch"]),
        ({"torch": 2.0, "a": 4.0, "b": 3.0}, ["b", "torch", "a"]),
        ({"torch": 5.0, "a": 4.0, "b": None}, ["b", "torch", "a"]),
    ],
    ids=["the-favoured-is-fastest", "another-is-faster", "the-favoured-is-wrong"],
)
def test_other_offers_are_tried_only_if_the_favoured_do_not_suffice(
    times: dict[str, float | None], measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, found = FakeSession(**times), dict[str, Outcome]()
    monkeypatch.setattr(measuring, "open_session", lambda *_: contextlib.nullcontext(session))
    trials = Trials(first=("fake:b", "fake:torch"), favoured=frozenset({"fake:b"}), source="a GPU")
    tried = candidates(offered=("torch", "a", "b"), device=preset("sm90"), trials=trials)
    assert [c.name for c in tried.missing] == ["fake:b", "fake:torch"]
    measure(tried, found, Progress())
    assert {o.name for o in found.values()} == {f"fake:{name}" for name in measured}
    tuned = dataclasses.replace(tried, known=found)
    assert tuned.complete  # the same command again measures nothing
    assert (
        _trials(tried)
        == "a tuning first tries those that measurements of a GPU favour, and leaves out 1 other if one is the fastest"
    )
    assert ("left out" in _trials(tuned)) == (len(measured) == 2)
    late = tried.within(0.0)
    measure(late, {}, Progress())  # what is not reached does not keep it waiting


def test_after_the_deadline_torch_alone_is_measured() -> None:
    session, outcomes = FakeSession(torch=5.0, a=4.0), dict[str, Outcome]()
    choices = [CHOICES["fake-fake:a"], dataclasses.replace(CHOICES["fake-fake:torch"], baseline=True)]
    late = candidates(offered=("a", "torch")).within(0.0)
    assert late.late
    examine_all(Measuring(session, late, outcomes, Progress()), sorted(choices, key=lambda c: not c.baseline))
    assert [name for name, _ in session.asked] == ["torch"]
    assert dataclasses.replace(late, known=outcomes).partial() == "1 of 2 choices are not measured yet"


def test_the_final_rounds_have_their_share_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "CPU_ROUNDS", 2.5)
    monkeypatch.setattr(trying, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    assert candidates().within(100.0).deadline == 100.0 - 2.5 * EFFORT["default"].rounds_s
    assert candidates(device=preset("sm90")).within(100.0).deadline == 100.0 - EFFORT["default"].rounds_s
    assert candidates().within(2.0).deadline == 1.0
    assert not candidates().late


@pytest.mark.parametrize(
    ("device", "outcomes", "now_us", "drift"),
    [
        (CPU, (), 8.0, 1.0),
        (CPU, (known("a"),), 8.0, 1.0),
        (CPU, (known("a", 4.0), known("b", 3.0, finalist=False)), 6.0, 2.0),
        (CPU, (known("a", 4.0, finalist=True), known("b", 2.0)), 8.0, 2.0),
        (CPU, (known("a", 4.0),), None, 1.0),
        (CPU, (known("a", 4.0),), 16.0, 1.0),
        (CPU, (known("a", 4.0),), 1.0, 1.0),
        (preset("sm90"), (known("a", 4.0),), 16.0, 4.0),
    ],
)
def test_drift_of_the_fastest_must_be_plausible_for_clocks(
    device: DeviceInfo, outcomes: tuple[Outcome, ...], now_us: float | None, drift: float
) -> None:
    session = FakeSession(a=now_us, b=now_us)
    assert drift_since(session, candidates(device=device), by_hash(*outcomes)) == drift  # type: ignore[arg-type]


def ranked(session: FakeSession, *outcomes: Outcome, entrants: int = 8, **fields: Any) -> dict[str, Outcome]:
    found = by_hash(*outcomes)
    progress = Stages()
    rank(Measuring(session, candidates(**fields), found, progress), entrants)
    assert all(o.settled for o in found.values())
    count = len(session.asked[0]) if session.asked else 0
    assert progress.told == ([("final rounds", 0, count), ("final rounds", count, count)] if count else [])
    return found


def test_after_a_refusal_the_others_are_ranked_again_and_nothing_is_settled() -> None:
    """A time that was none has dropped others: from the rounds, and on a GPU from the entrants."""
    gpu = preset("sm90")
    session = FakeSession(torch=50.0, a=1.0, b=35.0, c=30.0)
    session.stale = {"a"}
    found = by_hash(known("torch", 50.0), known("a", 1.0), known("b", 35.0), known("c", 30.0))
    assert rank(Measuring(session, candidates(device=gpu), found, Stages()), 8)
    assert session.asked == [("a", "torch"), ("torch",)]
    assert session.rechecked == [["a", "torch"], ["torch"]]
    refused = found["fake-fake:a"]
    assert (refused.status, refused.time_us, refused.reason) == (Status.WRONG_RESULT, None, "stale")
    assert [o.settled for o in found.values()] == [False, True, False, False]
    assert not rank(Measuring(session, candidates(device=gpu), found, Stages()), 8)
    assert session.asked[2] == ("c", "b", "torch"), "those near the next best"
    assert all(o.settled for o in found.values())
    assert pick(list(found.values())).name == "fake:c"  # type: ignore[union-attr]


def test_a_busy_machine_is_measured_once_if_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for busy, plays, waits in (("repeat", 2, 0), ("wait", 2, 1), ("accept", 1, 0)):
        waited: list[object] = []
        monkeypatch.setattr(neighbours, "disturbance", lambda *_: "a neighbour")
        monkeypatch.setattr(measuring, "wait_until_quiet", lambda device, tell, waited=waited: waited.append(device))
        session = FakeSession(torch=50.0, a=10.0)
        found = by_hash(known("torch", 5.0), known("a", 1.0))
        rank(Measuring(session, candidates(settings=Settings(busy=busy)), found, Stages()), 8)
        assert (len(session.asked), len(waited)) == (plays, waits)
        assert all(o.disturbed == "a neighbour" for o in found.values()), "marked in any case"


def test_a_quiet_repetition_replaces_disturbed_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter(["a neighbour", ""])
    monkeypatch.setattr(neighbours, "disturbance", lambda *_: next(seen))

    class Hurried(FakeSession):
        def rank(self, choices: Sequence[Choice]) -> Ranking:
            ranking = super().rank(choices)
            self.times = {name: time_us and time_us / 2 for name, time_us in self.times.items()}
            return ranking

    found = ranked(Hurried(torch=50.0, a=10.0), known("torch", 5.0), known("a", 1.0))
    assert [(o.time_us, o.disturbed) for o in found.values()] == [(25.0, ""), (5.0, "")]


def test_new_choices_are_ranked_and_settled() -> None:
    session = FakeSession(torch=50.0, a=10.0, b=20.0)
    found = ranked(session, known("torch", 5.0), known("a", 1.0), known("b", 2.0), known("c"))
    assert session.asked == [("a", "b", "torch")]
    assert [(o.time_us, o.finalist) for o in found.values()] == [(50.0, True), (10.0, True), (20.0, True), (None, False)]
    assert found["fake-fake:a"].info["margin_us"] == 1.0


def test_a_single_choice_is_ranked_and_checked_once() -> None:
    session = FakeSession(a=10.0)
    found = ranked(session, known("a", 1.0))["fake-fake:a"]
    assert (found.finalist, found.time_us, found.info[SETTLED]) == (True, 10.0, ALONE)
    assert (session.asked, session.rechecked) == ([("a",)], [["a"]])
    again = FakeSession()
    ranked(again, known("a", 1.0, finalist=True), known("b", 2.0, finalist=True))
    assert again.asked == []


def test_a_new_choice_runs_against_the_fastest_two_and_is_scaled_to_their_earlier_times() -> None:
    session = FakeSession(a=20.0, b=60.0, d=10.0, torch=500.0)
    found = ranked(
        session, known("torch", 40.0, finalist=True), known("a", 10.0, finalist=True), known("b", 20.0, finalist=True),
        known("c", 30.0, finalist=True), known("d", 9.0),
    )  # fmt: skip
    assert session.asked == [("d", "a", "b")]
    times = {name.removeprefix("fake-fake:"): o.time_us for name, o in found.items()}
    # a is 2 times slower than when it was ranked, b 3 times: by the median of 1/2 and 1/3
    assert times == {"torch": 40.0, "a": 10.0, "b": 20.0, "c": 30.0, "d": pytest.approx(10.0 * 5 / 12)}


def test_an_implausible_incumbent_scales_nothing() -> None:
    session = FakeSession(torch=5000.0, d=6.0)
    found = ranked(session, known("torch", 5.0, finalist=True), known("d", 6.0))
    assert {o.name: o.time_us for o in found.values()} == {"fake:torch": 5000.0, "fake:d": 6.0}
    gpu = ranked(FakeSession(torch=50.0, d=6.0), known("torch", 5.0, finalist=True), known("d", 6.0), device=preset("sm90"))
    assert gpu["fake-fake:d"].time_us == pytest.approx(0.6)


def test_a_much_faster_choice_still_runs_against_the_best() -> None:
    session = FakeSession(a=100.0, d=4.0)
    gpu = preset("sm90")
    found = ranked(session, known("a", 100.0, finalist=True), known("b", 120.0, finalist=True), known("d", 1.0), device=gpu)
    assert session.asked == [("d", "a")]
    assert found["fake-fake:d"].time_us == 4.0


def test_earlier_losers_and_failures_are_excluded() -> None:
    session = FakeSession(torch=50.0, a=10.0, b=None)
    found = ranked(session, known("torch", 5.0), known("a", 1.0), known("b", 2.0), known("c", 0.5, settled=True))
    assert session.asked == [("a", "b", "torch")]
    assert [o.finalist for o in found.values()] == [True, True, False, False]
    assert [o.time_us for o in found.values()] == [50.0, 10.0, None, 0.5]
    assert (found["fake-fake:b"].status, found["fake-fake:b"].reason) == (Status.CRASHED, "in the final rounds")


def test_ranks_near_choices_on_a_gpu_and_all_on_a_cpu() -> None:
    times = {"torch": 9.0, "a": 1.0, "b": 1.2, "c": 1.3}
    outcomes = [known(name, time_us) for name, time_us in times.items()]
    for device, names in ((CPU, ("a", "b", "c", "torch")), (preset("sm90"), ("a", "b", "torch"))):
        session = FakeSession(**times)
        ranked(session, *outcomes, device=device)
        assert session.asked == [names]
    session = FakeSession(**times)
    ranked(session, *outcomes, entrants=1)
    assert session.asked == [("a", "torch")]


def test_marks_outcomes_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, float]] = []
    monkeypatch.setattr(neighbours, "disturbance", lambda device, *facts: told.append(facts) or facts[0])
    session = FakeSession(torch=50.0, a=10.0)
    session.seen = "a neighbour"
    stored = known("b", 20.0, from_store=True, finalist=True)
    session.times["b"] = 20.0
    found = ranked(session, known("torch", 5.0), known("a", 1.0), stored, known("c"))
    for torch_us in (50.0, None):
        session.asked, session.spreads, session.times["torch"] = [], {"torch": 0.3, "a": 0.9}, torch_us
        ranked(session, known("a", 1.0), known("b", 2.0), known("torch", 5.0))
    facts = [("a neighbour", 0.0, 1.0), ("a neighbour", 0.3, 1.0), ("a neighbour", 0.0, 1.0)]
    assert told[::2] == facts, "the spread of torch's own times, and how much longer what was known takes"
    assert told[1::2] == facts, "each is played once more"
    assert [o.info.get(DISTURBED) for o in found.values()] == ["a neighbour", "a neighbour", None, None]


def test_an_outcome_stores_its_position_and_host_time() -> None:
    made = candidates(offered=("torch", "a"), host_us=2.5)
    sample = Sample(status=Status.OK, time_us=3.0, error_over_bound=0.5)
    first, second, variant = (outcome(CHOICES[f"fake-fake:{x}"], made, sample) for x in ("torch", "a", "b"))
    assert (first.info[PLACE], second.info[PLACE], PLACE in variant.info) == (0, 1, False)
    assert (first.info[HOST_US], first.baseline, second.baseline) == (2.5, True, False)
    assert (first.time_us, first.error_over_bound, first.status, first.reason) == (3.0, 0.5, Status.OK, "")
    assert HOST_US not in outcome(CHOICES["fake-fake:a"], candidates(), sample).info


def errors() -> Iterator[tuple[Status, str, str | None]]:
    """Yield the status and the reason of failures, and what the machine did."""
    for cause, raised in {
        "memory was short": [torch.OutOfMemoryError("CUDA out of memory."), MemoryError("std::bad_alloc"), MemoryError()]
        + [RuntimeError(x) for x in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")],
        "the stack was too deep": [RecursionError("maximum recursion depth exceeded")],
        "no process or thread could start": [RuntimeError("can't start new thread"), BlockingIOError(11, os.strerror(11))],
        "too many files were open": [OSError(24, os.strerror(24)), OSError(23, os.strerror(23))],
        "the disk was full": [OSError(28, os.strerror(28)), OSError(122, os.strerror(122)), CompileError("x", os.strerror(28))],
        "the file system failed": [OSError(5, os.strerror(5)), OSError(116, os.strerror(116))],
        "it was interrupted": [InterruptedError(4, os.strerror(4))],
        "the GPU was lost": [RuntimeError("CUDA error: uncorrectable ECC error encountered")],
        "the process was killed": [CompileError("x", "g++: fatal error: Killed signal terminated program cc1plus")],
        None: [CompileError("x", "a wrong name"), ValueError("wrong"), RuntimeError("CUDA error: an illegal memory access")],
    }.items():  # fmt: skip
        yield from ((*failure_of(error), cause) for error in raised)
    for status, reason, cause in (
        (Status.OUT_OF_RESOURCES, "OutOfResources: shared memory, Required: 300000, Hardware limit: 232448", None),
        (Status.REFUSED, "not for this problem: RecursionError: maximum recursion depth exceeded", "the stack was too deep"),
        (Status.WRONG_RESULT, "got KeyboardInterrupt", None),
        (Status.CRASHED, "the worker died by SIGKILL", "the process was killed"),
        (Status.CRASHED, "the worker died by SIGTERM", "the process was killed"),
        (Status.CRASHED, "the worker died by SIGSEGV", None),
        (Status.CRASHED, "the worker exited with status 4", None),
        (Status.CRASHED, "exited with status 1; libgomp: Resource temporarily unavailable", "no process or thread could start"),
        (Status.CRASHED, f"worker process {GARBLED} and was killed: got a message of -5 bytes", "its answer was garbled"),
        (Status.TIMED_OUT, f"{NO_ANSWER} 60 s", "it ran out of time"),
        (Status.COMPILE_TIMEOUT, f"not compiled within 120 s {WHILE_BUSY}others used 50% of the cores", "it ran out of time"),
        (Status.COMPILE_TIMEOUT, "not compiled within 120 s (compile_timeout_s)", None),
    ):
        yield status, reason, cause


@pytest.mark.parametrize(("status", "reason", "disturbed"), list(errors()))
def test_marks_failures_that_the_machine_caused(status: Status, reason: str, disturbed: str | None) -> None:
    failed = outcome(CHOICES["fake-fake:a"], candidates(offered=("a",)), Sample(status=status, reason=reason))
    assert failed.info.get(DISTURBED) == disturbed


def test_a_table_that_lacks_a_choice_by_an_accident_is_marked() -> None:
    work = Work(RowClass(problem=PROBLEM), range(1, 9), CPU, Settings(), 0.0, Progress())
    work.wrong["fake:a"] = "M = 8: got 1.0, expected 2.0"
    assert work.disturbed == ""
    work.wrong["fake:b"] = "M = 8: OSError: [Errno 28] No space left on device"
    assert work.disturbed == "the disk was full"


def test_narrows_fused_offers_by_unfused_times() -> None:
    def compiled(name: str) -> Fake:
        return fake(name, artifact=f"{name}.so")

    names = [f"k{i}" for i in range(12)]
    choices = {c.content_hash: c for c in (fake("torch"), *map(compiled, names))}
    offers = Offers(choices=tuple(choices.values()))
    times = {name: 10.0 + i / 4 for i, name in enumerate(names)}
    alone = candidates(choices=choices, known=by_hash(known("torch", 1.0), *(known(name, t) for name, t in times.items())))
    made = candidates(choices=choices)
    wide = dataclasses.replace(made, offers=offers).narrowed(alone)
    assert [c.name for c in wide.offers.choices] == ["fake:torch", *(f"fake:k{i}" for i in range(8))]
    far = dataclasses.replace(alone, known=by_hash(known("k0", 8.0), known("k1", 10.0), known("k2", 10.1)))
    kept = dataclasses.replace(made, offers=offers).narrowed(far)
    assert [c.name for c in kept.offers.choices] == ["fake:torch", "fake:k0", "fake:k1"], "within a quarter"
    nothing = dataclasses.replace(alone, known=by_hash(known("torch", 1.0)))
    assert dataclasses.replace(made, offers=offers).narrowed(nothing).offers is offers


def test_reopens_losers_to_excluded_choices() -> None:
    def opened(*outcomes: Outcome) -> list[str]:
        found = _reopened(by_hash(*outcomes))
        return [o.name.removeprefix("fake:") for o in found.values() if o.status is Status.OK and not o.settled]

    torch = known("torch", 5.0, finalist=True, settled=True)
    faster, slower, failed = known("a", 4.0, settled=True), known("b", 6.0, settled=True), known("c", settled=True)
    assert opened(torch, faster, slower, failed) == ["a"]
    assert opened(torch, known("d", 5.0, settled=True)) == ["d"]
    assert opened(torch, faster, known("d", 3.0, finalist=True, settled=True)) == []
    assert opened(faster, slower) == []


def test_candidates_are_complete_when_every_offer_was_compared() -> None:
    two = candidates(offered=("torch", "a"))
    assert (two.only, two.picked, two.complete) == (None, None, False)
    assert [c.name for c in two.missing] == ["fake:torch", "fake:a"]
    alone = candidates(offered=("a",))
    assert alone.only is None, "it has to be proved right"
    assert dataclasses.replace(alone, settings=Settings(verify=False)).only == CHOICES["fake-fake:a"]
    torch = CHOICES["fake-fake:torch"]
    assert dataclasses.replace(alone, offers=Offers(choices=(torch,))).only is torch
    half = dataclasses.replace(two, known=by_hash(known("torch", 5.0, settled=True)))
    assert ([c.name for c in half.missing], half.complete) == (["fake:a"], False)
    open_ = dataclasses.replace(two, known=by_hash(known("torch", 5.0, settled=True), known("a", 4.0)))
    assert (open_.missing, open_.complete) == ([], False)
    done = dataclasses.replace(two, known=by_hash(known("torch", 5.0, settled=True), known("a", 4.0, settled=True)))
    assert done.complete
    assert done.picked is CHOICES["fake-fake:a"]
