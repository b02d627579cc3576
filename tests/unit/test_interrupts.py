"""SIGTERM and SIGHUP within a block: cleaning up runs, then the process ends as it would have."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemmtune import cli, settings
from gemmtune.device import detect
from gemmtune.dispatch.host import host_us
from gemmtune.interrupts import ENDING, Terminated, finishing, not_lost, raising
from gemmtune.problem import Problem
from gemmtune.selector import select as selecting
from gemmtune.selector.candidates import Candidates, candidates_for
from gemmtune.selector.progress import Progress
from gemmtune.selector.result import Outcome
from gemmtune.store.store import Store


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_raises_within_the_block_only(number: signal.Signals, request: pytest.FixtureRequest):
    cleaned: list[bool] = []
    before = signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored
    request.addfinalizer(lambda: signal.signal(number, before))

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # a second one while cleaning up
            cleaned.append(True)

    with pytest.raises(Terminated) as caught, raising():
        work()
    assert cleaned
    assert caught.value.status == 128 + number
    assert isinstance(caught.value, KeyboardInterrupt)
    assert signal.getsignal(number) is signal.SIG_DFL
    with pytest.raises(SystemExit), raising(lambda number: SystemExit(128 + number)):
        signal.raise_signal(number)


def test_handlers_of_the_program_stay(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with raising():
            signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    with raising():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # set within the block
        signal.raise_signal(signal.SIGHUP)
    assert signal.signal(signal.SIGHUP, signal.SIG_DFL) is signal.SIG_IGN


def test_other_threads_take_no_signal():
    found: list[object] = []

    def work() -> None:
        with raising():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def ended(work: Callable[[], None]) -> int:
    """How a fork that does this ends: its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def importing(error: type[Exception] | None) -> None:
    """Import as C code does that clears an interruption, or turns it into an error of its own."""
    with not_lost():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if error is not None:
                raise error("half imported") from None


def test_an_interruption_of_an_import_is_not_lost() -> None:
    for error in (None, RuntimeError):
        with pytest.raises(KeyboardInterrupt):
            importing(error)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with not_lost():
        pass
    ended: list[bool] = []
    mine = signal.signal(signal.SIGINT, lambda *_: ended.append(False))
    try:
        with not_lost():
            signal.raise_signal(signal.SIGINT)
            assert ended == [False]  # a program's own handler stays
    finally:
        signal.signal(signal.SIGINT, mine)


def test_the_process_ends_by_the_signal_after_cleaning_up(tmp_path: Path):
    def work() -> None:
        with finishing():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                (tmp_path / "kept").write_text("x")

    assert ended(work) == -signal.SIGTERM
    assert (tmp_path / "kept").exists()
    with raising():  # a fork within a block dies, and does not do its parent's cleaning up
        assert ended(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM


def test_a_terminated_tuning_keeps_its_measurements(own_store: Path, monkeypatch: pytest.MonkeyPatch):
    problem = Problem.mm(16, 16, 16, dtype=torch.float32, device_type="cpu")
    device = detect("cpu")

    def measure(candidates: Candidates, outcomes: dict[str, Outcome], *_: object) -> Candidates:
        choice = candidates.offers.choices[0]
        outcomes[choice.content_hash] = Outcome(
            name=choice.name,
            backend=choice.backend,
            content_hash=choice.content_hash,
            status="ok",
            time_us=5.0,  # type: ignore[arg-type]
        )
        os.kill(os.getpid(), signal.SIGTERM)
        return candidates

    monkeypatch.setattr(selecting, "measure", measure)
    with settings.patch(tune="force") as given:
        candidates = candidates_for(problem, device, given, host_us=host_us(device, given))
        assert ended(lambda: selecting.select(candidates, Progress()) and None) == -signal.SIGTERM
    assert [row.time_us for row in Store.open(own_store).every_row()] == [5.0]


@pytest.mark.parametrize("number", ENDING)
def test_a_terminated_command_says_what_is_kept(number: signal.Signals, capsys, monkeypatch, own_store: Path):
    monkeypatch.setattr("gemmtune.cli.tune.run_tuning", lambda *_, **__: signal.raise_signal(number))
    assert cli.run(["tune", "64x64x64", "--device", "cpu"]) == 128 + number
    assert capsys.readouterr().err == f"interrupted by {number.name}: nothing was measured yet\n"
    monkeypatch.setattr("gemmtune.cli.perf_gate.run_gate", lambda *_, **__: signal.raise_signal(number))
    assert cli.run(["perf-gate", "64x64x64", "--device", "cpu"]) == 128 + number
    assert capsys.readouterr().err.strip() == f"interrupted by {number.name}"
