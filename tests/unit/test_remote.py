"""Sessions in a worker process, including workers that die, hang or are corrupted."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_choices import PROBLEM, fake

from gemmtune.choice import Status
from gemmtune.device import detect, preset
from gemmtune.problem.rows import row_classes
from gemmtune.selector import remote
from gemmtune.selector.offers import offers_for
from gemmtune.selector.remote import RemoteSession, measuring_kind, open_session
from gemmtune.selector.samples import Ranking, Sample
from gemmtune.selector.session import Session
from gemmtune.settings import Settings
from gemmtune.timing.rounds import Ranked
from gemmtune.workers.worker import START_TIMEOUT_S, NoWorkerError, WorkerCrashed, WorkerTimedOut

CPU, SETTINGS = detect("cpu"), Settings(choice_timeout_s=7.0)
RIGHT = Sample(status=Status.OK, time_us=3.0)


class FakeWorker:
    """Worker that answers with ``answer(method, choices)``, a value or an exception, and can die."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.alive = True

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        name = function.__name__.removeprefix("_")
        method, *rest = args if name == "do" else (name, args)
        self.pool.calls.append((self.pool.made.index(self), method, timeout_s))
        found = self.pool.answer(method, *rest) if name == "do" or name in self.pool.broken else None
        if isinstance(found, Exception):
            self.alive = isinstance(found, ValueError)
            raise found
        return found

    def close(self) -> None:
        self.alive = False


class FakePool:
    """Fake pool that records all workers made and returned."""

    def __init__(self) -> None:
        self.made: list[FakeWorker] = []
        self.given: list[tuple[str, int, bool]] = []
        self.calls: list[tuple[int, str, float]] = []
        self.broken: set[str] = set()
        self.answer: Callable[..., Any] = lambda *_: (RIGHT, False)

    def take(self, kind: str) -> FakeWorker:
        assert kind == "measure-cpu:0"
        self.made.append(FakeWorker(self))
        return self.made[-1]

    def give(self, kind: str, worker: FakeWorker) -> None:
        self.given.append((kind, self.made.index(worker), worker.alive))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> FakePool:
    pool = FakePool()
    monkeypatch.setattr(remote, "WORKERS", pool)
    return pool


def test_one_worker_serves_a_session_and_returns_to_the_pool(pool: FakePool) -> None:
    with open_session(PROBLEM, CPU, SETTINGS) as session:
        assert isinstance(session, RemoteSession)
        assert not pool.made, "one is taken when there is something to do"
        assert session.examine(fake("x"), None) == session.prove(fake("x")) == session.prove_rows(fake("x")) == RIGHT
        assert session.same_rows(fake("x"), [fake("y")]) == RIGHT
    asked = ["open", "examine", "prove", "prove_rows", "same_rows", "close"]
    limits = {"open": START_TIMEOUT_S}  # importing torch is no work of a choice
    assert pool.calls == [(0, name, limits.get(name, 7.0)) for name in asked]
    assert pool.given == [("measure-cpu:0", 0, True)]
    session.close()
    assert len(pool.given) == 1
    assert isinstance(open_session(PROBLEM, CPU, Settings(tune_in_subprocess=False)), Session)
    assert measuring_kind(CPU) == "measure-cpu:0"


@pytest.mark.parametrize(
    ("error", "status", "reason", "workers"),
    [
        (WorkerTimedOut("no answer in 7 s"), Status.TIMED_OUT, "no answer in 7 s; the limit is the setting choice_timeout_s", 2),
        (WorkerCrashed("killed by SIGSEGV"), Status.CRASHED, "killed by SIGSEGV", 2),
        (ValueError("not to be pickled"), Status.RUNTIME_ERROR, "ValueError: not to be pickled", 1),
    ],
)
def test_the_death_of_a_worker_becomes_a_status(
    error: Exception, status: Status, reason: str, workers: int, pool: FakePool
) -> None:
    session = RemoteSession(PROBLEM, CPU, SETTINGS)
    pool.answer = lambda method, choice, *_: error if choice.name == "fake:bad" else (RIGHT, False)
    assert session.examine(fake("bad"), None) == Sample(status=status, reason=reason)
    assert session.examine(fake("good"), None) == RIGHT
    assert len(pool.made) == workers


def test_a_worker_that_cannot_start_is_no_failure_of_a_choice(pool: FakePool) -> None:
    pool.answer = lambda *_: NoWorkerError("exited with status 1")
    with pytest.raises(NoWorkerError, match=r"exited with status 1; sys\.executable is"):
        RemoteSession(PROBLEM, CPU, SETTINGS).examine(fake("x"), None)


def test_a_corrupted_worker_is_replaced(pool: FakePool) -> None:
    session = RemoteSession(PROBLEM, CPU, SETTINGS)
    pool.answer = lambda method, choice, *_: (RIGHT, choice.name == "fake:ruins")
    assert session.examine(fake("ruins"), None) == RIGHT
    assert not pool.made[0].alive
    session.prove(fake("good"))
    assert [call[:2] for call in pool.calls] == [(0, "open"), (0, "examine"), (1, "open"), (1, "prove")]


def test_a_worker_that_cannot_open_the_session_is_closed(pool: FakePool) -> None:
    session = RemoteSession(PROBLEM, CPU, SETTINGS)
    pool.broken.add("open")
    pool.answer = lambda *_: ValueError("no such device")
    assert session.prove(fake("x")).reason == "ValueError: no such device"
    assert not pool.made[0].alive
    session.close()
    assert pool.given == []


def test_a_worker_may_die_at_the_end(pool: FakePool) -> None:
    session = RemoteSession(PROBLEM, CPU, SETTINGS)
    session.prove(fake("x"))
    pool.broken.add("close")
    pool.answer = lambda *_: WorkerCrashed("killed")
    session.close()
    assert pool.given == [("measure-cpu:0", 0, False)]
    session.close()
    assert pool.calls[-1][1] == "close"


def times(choices: list[Any]) -> Ranking:
    return Ranking(times={c.name: Ranked(time_us=1.0, margin_us=0.0) for c in choices})


@pytest.mark.parametrize("how", ["crash", "ruin"])
def test_choices_that_kill_the_final_rounds_run_in_isolation(how: str, pool: FakePool, caplog: pytest.LogCaptureFixture) -> None:
    def answer(method: str, choices: list[Any], rounds_s: float | None) -> Any:
        assert (method, rounds_s) == ("rank", 0.5)
        asked.append([c.name.removeprefix("fake:") for c in choices])
        if "bad" not in asked[-1]:
            return times(choices), False
        return WorkerCrashed("killed by SIGSEGV") if how == "crash" else (times(choices), True)

    asked: list[list[str]] = []
    pool.answer = answer
    session = RemoteSession(PROBLEM, CPU, SETTINGS)
    with caplog.at_level(logging.WARNING, "gemmtune"):
        assert list(session.rank([fake("a"), fake("bad"), fake("b")], 0.5).times) == ["fake:a", "fake:b"]
    assert asked == [["a", "bad", "b"], ["a"], ["bad"], ["b"], ["a", "b"]]
    assert len(pool.made) == 3
    assert [call[2] for call in pool.calls if call[1] == "rank"] == [21.0, 7.0, 7.0, 7.0, 14.0]
    told = f"ended the measuring process: {'killed by SIGSEGV' if how == 'crash' else 'the GPU context is lost'}"
    assert [told in r.message for r in caplog.records] == [True, True]
    asked.clear()
    assert session.rank([fake("bad")], 0.5).times == {}
    assert asked == [["bad"]], "alone it is not tried again"
    assert session.rank([], 0.5).times == {}


def test_checks_that_end_the_process_say_so_within_their_time(pool: FakePool, caplog: pytest.LogCaptureFixture) -> None:
    session = RemoteSession(PROBLEM, CPU, SETTINGS)
    pool.answer = lambda *_: WorkerCrashed("killed by SIGSEGV")
    with caplog.at_level(logging.WARNING, "gemmtune"):
        assert session.equal_rows(fake("whole"), fake("part"), row_classes(PROBLEM)[0], [3, 5, 9]) == []
    assert "the bits of fake:part at M = 3 to 9 could not be compared: killed by SIGSEGV" in caplog.text
    assert {x.status for x in session.recheck([fake("a"), fake("b"), fake("c")]).values()} == {Status.CRASHED}
    assert [call[2] for call in pool.calls if call[1] == "recheck"] == [21.0, 7.0, 7.0, 7.0]


def test_unmeasurable_limits_are_missing(pool: FakePool, caplog: pytest.LogCaptureFixture) -> None:
    session = RemoteSession(PROBLEM, CPU, SETTINGS)
    pool.answer = lambda *_: (({"bandwidth_gbps": 5.0}, "a neighbour"), False)
    assert session.limits({}) == ({"bandwidth_gbps": 5.0}, "a neighbour")
    pool.answer = lambda *_: WorkerTimedOut("no answer in 7 s")
    with caplog.at_level(logging.WARNING, "gemmtune"):
        assert session.limits({}) == ({}, "")
    assert f"the limits of {CPU.name} could not be measured: no answer in 7 s" in caplog.text


def test_a_worker_holds_one_session_and_reports_corruption(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Fake:
        def __init__(self, *arguments: Any, root: int) -> None:
            self.dead, self.closed, self.arguments, self.root = False, False, arguments, root
            made.append(self)

        def close(self) -> None:
            self.closed = True

        def prove(self, dies: bool, error: Exception | None) -> Sample:
            self.dead = dies
            if error is not None:
                raise error
            return RIGHT

    monkeypatch.setattr(remote, "Session", Fake)
    remote._open(PROBLEM, CPU, SETTINGS, 2.0)
    assert (made[0].arguments, made[0].root) == ((PROBLEM, CPU, SETTINGS, 2.0), os.getppid())
    remote._open(PROBLEM, CPU, SETTINGS, 0.0)
    assert (made[0].closed, made[1].closed) == (True, False)
    assert remote._do("prove", False, None) == (RIGHT, False)
    assert remote._do("prove", True, None) == (RIGHT, True)
    with pytest.raises(ValueError, match="a bug"):
        remote._do("prove", False, ValueError("a bug"))
    assert remote._do("prove", True, ValueError("illegal address")) == (None, True)
    remote._close()
    assert made[1].closed
    assert remote._sessions == []


@pytest.mark.parametrize(("arch", "dead", "emptied"), [("sm90", False, True), ("sm90", True, False), ("cpu", False, False)])
def test_closing_frees_graph_memory_unless_the_context_is_lost(
    arch: str, dead: bool, emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append(True))
    session = Session(PROBLEM, CPU if arch == "cpu" else preset(arch), SETTINGS)
    session.dead = dead
    session.close()
    assert bool(called) == emptied


def test_prepares_the_measuring_process_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[object, ...]] = []
    monkeypatch.setattr(remote.WORKERS, "prepare", lambda *arguments: prepared.append(arguments))
    monkeypatch.setattr(remote.WORKERS, "post", lambda kind, function: prepared.append((kind, *function.args)))
    remote.prepare_measuring(preset("sm90"), SETTINGS)
    remote.prepare_measuring(CPU, SETTINGS)
    remote.import_meanwhile(CPU, "numpy")
    (*gpu, warm_up), cpu, later = prepared
    ran: list[str] = []
    monkeypatch.setattr(remote, "offers_for", functools.partial(offers_for, on_this_machine=False))
    for name in ("examine", "prove"):
        monkeypatch.setattr(Session, name, lambda self, choice, *_, name=name: ran.append(f"{name} {choice.backend}"))
    warm_up()
    remote.prepare_measuring(preset("sm90"), SETTINGS, timed=False)
    prepared[-1][-1]()
    assert ran == ["examine aten", "prove aten"], "a process that only verifies times nothing"
    assert gpu == ["measure-cuda:0", 1, ("gemmtune.selector.remote",)]
    assert callable(warm_up)
    assert cpu == ("measure-cpu:0", 1, ("gemmtune.selector.remote",), None)
    assert later == ("measure-cpu:0", "numpy")
