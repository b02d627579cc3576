"""Tuning in the background: calls take tables over, what ends it, and what it waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_ranges import RowedBackend, W, backend
from torch import nn

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.ready import generation
from gemmtune.errors import InvalidProblemError
from gemmtune.integration import background, swap
from gemmtune.integration.background import Patience, tuning_in_background
from gemmtune.integration.eager import Bound
from gemmtune.integration.swap import swaps
from gemmtune.workers.worker import WorkerCrashed

__all__ = ["backend"]


class Here:
    """A worker that makes tables in this process. ``error`` is raised for a job instead, if it returns one."""

    error: Callable[[Any], Exception | None] = staticmethod(lambda job: None)
    made = 0
    alive = False  # nothing to end
    pid = 0

    def __init__(self, **_: object) -> None:
        Here.made += 1

    def call(self, function: Callable[[Any], None], job: Any, *, timeout_s: float) -> None:
        error = Here.error(job)
        if error is not None:
            raise error
        function(job)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    tuning_in_background().stop()
    tuning_in_background()._reset()
    swaps.forget()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    """Make tables in a thread of this process."""
    monkeypatch.setattr(background, "Worker", Here)
    monkeypatch.setattr(background, "IDLE_SHARE", float("inf"))
    monkeypatch.setattr(background.os, "nice", lambda _: 0)
    monkeypatch.setattr(Here, "error", staticmethod(lambda job: None))
    monkeypatch.setattr(Here, "made", 0)
    return Here


def layer(n: int = W.shape[1]) -> nn.Linear:
    linear = nn.Linear(W.shape[0], n, bias=False)
    linear.weight = nn.Parameter(W.t()[:n].contiguous(), requires_grad=False)
    return linear


def ended() -> None:
    while not tuning_in_background().done:
        time.sleep(0.01)


def test_a_call_of_a_layer_takes_a_table_over(backend: RowedBackend, here: type[Here], monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []
    run = Bound.run
    monkeypatch.setattr(Bound, "run", lambda self, *args: ran.append(self.pick.plan.choice.name) or run(self, *args))
    x = torch.randn(30, W.shape[0])
    model = gemmtune.optimize(layer(), tune="background", m=(1, 64))
    ended()
    number = generation.number
    assert swaps.pending
    with torch.no_grad():
        # A capture must not load kernels: the table waits for a later call.
        with monkeypatch.context() as capturing:
            capturing.setattr(swap.torch.cuda, "is_initialized", lambda: True)
            capturing.setattr(swap.torch.cuda, "is_current_stream_capturing", lambda: True)
            torch.testing.assert_close(nn.Linear.forward(model, x), x @ W)
            swaps.apply()
        assert (swaps.pending, generation.number, ran) == (True, number, [])
        torch.testing.assert_close(model(x), x @ W)
    assert not swaps.pending
    assert ran == ["fake:high"]


def test_several_models_share_one_process_and_stored_tables_need_none(backend: RowedBackend, here: type[Here], monkeypatch):
    def origin(rows: int, n: int = 8) -> str:
        return gemmtune.explain("mm", torch.randn(rows, W.shape[0]), layer(n).weight.t()).origin

    for model in (nn.Sequential(layer(), layer(16)), layer(), layer(8)):
        gemmtune.optimize(model, tune="background", m=(1, 64))
    assert tuning_in_background().wait(60)
    assert (here.made, str(tuning_in_background())) == (1, "background tuning: 3 tables made, 0 left")
    gemmtune.optimize(layer(), tune="background", m=(1, 64))
    assert (here.made, tuning_in_background().done) == (1, True)
    monkeypatch.setitem(background.ROWS, "cpu", range(1, 9))
    gemmtune.optimize(layer(4), tune="background")
    assert tuning_in_background().wait(60)
    for rows, n in ((64, 8), (8, 4)):
        assert "table of its range" in origin(rows, n)
        assert "which ends before" in origin(rows + 1, n)


def test_a_process_that_dies_is_reported_once_and_the_model_serves_on(backend: RowedBackend, here: type[Here], monkeypatch, caplog):
    monkeypatch.setattr(here, "error", staticmethod(lambda job: WorkerCrashed("worker process died by SIGKILL")))
    x = torch.randn(3, W.shape[0])
    model = gemmtune.optimize(nn.ModuleList([layer(), layer(8)]), tune="background", m=(1, 64))
    ended()
    torch.testing.assert_close(model[0](x), x @ W)
    lines = [line for line in caplog.messages if "background tuning ended" in line]
    assert len(lines) == 1
    assert "with 2 tables left, and models run what is known: worker process died by SIGKILL; optimize(model, tune=" in lines[0]
    assert str(tuning_in_background()) == "background tuning: 0 tables made, 2 left (worker process died by SIGKILL)"
    monkeypatch.setattr(here, "error", staticmethod(lambda job: None))
    gemmtune.optimize(model, tune="background", m=(1, 64))
    assert tuning_in_background().wait(60)
    assert str(tuning_in_background()) == "background tuning: 2 tables made, 0 left"


def test_a_weight_that_cannot_be_tuned_does_not_stop_the_others(backend: RowedBackend, here: type[Here], monkeypatch, caplog):
    fails = staticmethod(lambda job: RuntimeError("out of memory") if job.rows_class.problem.n == 8 else None)
    monkeypatch.setattr(here, "error", fails)
    gemmtune.optimize(nn.Sequential(layer(8), layer()), tune="background", m=(1, 64))
    ended()
    assert sum("no table of mm Mx8x16" in line and "RuntimeError: out of memory" in line for line in caplog.messages) == 1
    assert str(tuning_in_background()) == "background tuning: 1 tables made, 0 left, 1 failed"
    assert "table of its range" in gemmtune.explain("mm", torch.randn(5, W.shape[0]), W).origin


class Waiting(Here):
    """A worker whose job waits until the test lets it go on, or until it is aborted."""

    begun, go, aborted = threading.Event(), threading.Event(), threading.Event()

    def call(self, function: Callable[[Any], None], job: Any, *, timeout_s: float) -> None:
        self.begun.set()
        assert self.go.wait(60)
        if self.aborted.is_set():
            raise WorkerCrashed("worker process died by SIGKILL")
        super().call(function, job, timeout_s=timeout_s)

    def abort(self) -> None:
        self.aborted.set()
        self.go.set()


@pytest.fixture
def waiting(here: type[Here], monkeypatch: pytest.MonkeyPatch) -> type[Waiting]:
    """Let the first table wait for ``go``, and ``stop`` wait for it only shortly."""
    monkeypatch.setattr(background, "Worker", Waiting)
    monkeypatch.setattr(background, "ENDING_S", 0.01)
    for event in (Waiting.begun, Waiting.go, Waiting.aborted):
        event.clear()
    return Waiting


def test_restore_drops_the_tables_that_no_other_model_waits_for(backend: RowedBackend, waiting: type[Waiting]):
    tuning = tuning_in_background()
    first = gemmtune.optimize(nn.Sequential(layer(), layer(4), layer(16)), tune="background", m=(1, 64))
    second = gemmtune.optimize(layer(16), tune="background", m=(1, 64))
    assert waiting.begun.wait(60)
    gemmtune.restore(nn.ReLU())
    assert str(tuning) == "background tuning: 0 tables made, 3 left"
    gemmtune.restore(torch.nn.Sequential(first))  # in another module since
    assert str(tuning) == "background tuning: 0 tables made, 2 left"  # the one that is being made, and that of ``second``
    waiting.go.set()
    assert tuning.wait(60)
    assert str(tuning) == "background tuning: 2 tables made, 0 left"
    gemmtune.restore(second)
    assert str(tuning) == "background tuning: 2 tables made, 0 left"


def test_restore_of_the_only_model_stops_the_tuning(backend: RowedBackend, waiting: type[Waiting], caplog):
    tuning = tuning_in_background()
    model = gemmtune.optimize(nn.Sequential(layer(), layer(4)), tune="background", m=(1, 64))
    assert waiting.begun.wait(60)
    gemmtune.restore(model)
    assert tuning.wait(60)
    assert (waiting.made, waiting.aborted.is_set()) == (1, True)
    assert str(tuning) == "background tuning: 0 tables made, 2 left (stopped)"
    assert not [line for line in caplog.messages if "background tuning ended" in line], "nobody asks why"


def test_a_tuning_that_is_stopped_before_its_process_starts_makes_nothing(backend: RowedBackend, here: type[Here], monkeypatch):
    jobs: list[background.Job] = []
    monkeypatch.setattr(background.BackgroundTuning, "add", lambda self, found, model: jobs.extend(found))
    gemmtune.optimize(layer(), tune="background", m=(1, 64))
    tuning_in_background()._make(jobs[0])  # as the thread does that took the job before ``stop`` cleared the list
    assert (here.made, str(tuning_in_background())) == (0, "background tuning: 0 tables made, 0 left")


@pytest.mark.parametrize(
    ("model", "tune", "changes", "message"),
    [
        (
            layer(),
            "background",
            {"batch_invariant": True},
            "batch_invariant=True, with which a table that comes later chan",
        ),
        (layer(), "background", {"rows": "exact"}, "tune: got 'background' with the setting rows='exact', with which no table is"),
        (layer(), "later", {}, "tune: got 'later', expected example inputs or 'background'"),
        (nn.ReLU(), "background", {}, "got a ReLU without a layer that has a table, expected an nn.Linear or HF's Conv1D"),
    ],
    ids=["batch-invariant", "exact", "text", "no layer"],
)
def test_what_is_refused(own_store, model: nn.Module, tune: str, changes: dict[str, object], message: str):
    with settings.patch(**{"rows": "shared"} | changes), pytest.raises(InvalidProblemError, match=message):
        gemmtune.optimize(model, tune=tune)
    assert tuning_in_background().done


def test_a_step_waits_while_the_other_process_works(monkeypatch: pytest.MonkeyPatch):
    clock, worked = [0.0], iter((0.0, 0.9, 1.3, 1.4, 1.4, 1.41))
    monkeypatch.setattr(background.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(background.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert Patience(os.getpid())._worked_s() > 0
    assert Patience(2**30)._worked_s() == 0, "no such process"
    monkeypatch.setattr(Patience, "_worked_s", lambda self: next(worked))
    patient = Patience(1)
    patient.stage("sampled M", 0, 2)
    assert clock == [0.0], "too early to tell"
    clock[0] = 1.0
    patient.stage("sampled M", 1, 2)
    assert clock == [1.0 + 3 * background.PAUSE_S], "0.9, 0.8 and 0.2 of a core, then none"
    clock[0] += 1.0
    patient.stage("sampled M", 2, 2)
    assert clock == [2.0 + 3 * background.PAUSE_S], "a hundredth of a core is no work"


def test_a_process_of_its_own_tunes_and_ends(own_store, tmp_path):
    """It makes a table, a fork of this process has none of it, and ``stop`` ends it."""
    tuning = tuning_in_background()
    with settings.patch(rows="shared", backends=("aten", "cpp"), search="quick", busy="accept"):
        gemmtune.optimize(layer(), tune="background", m=(1, 2))
        assert not tuning.wait(0)
        assert tuning.wait(120)
        assert "table of its range" in gemmtune.explain("mm", torch.randn(2, W.shape[0]), W).origin
        gemmtune.optimize(nn.Linear(512, 512), tune="background")
        while tuning._worker is None:
            time.sleep(0.01)
        pid = tuning._worker.pid
        child = os.fork()
        if not child:
            tuning.stop()
            os._exit(0 if tuning.done and str(tuning) == "background tuning: 0 tables made, 0 left (stopped)" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.kill(pid, 0)  # a fork ends nobody's process
        tuning.stop()
        assert tuning.done
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
