"""tuning_lock: one process tunes a problem, others wait for it; the dead hold nothing; no folder, no lock, one warning."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
from store_cases import KEYS, MACHINES, fork, kill, one_warning, status_of

from gemmtune.settings import Settings
from gemmtune.workers.locks import tuning_lock


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path / "cache"))


def test_a_free_lock_is_taken_without_waiting(settings: Settings) -> None:
    for _ in range(2):
        with tuning_lock(settings, KEYS[0], MACHINES[0]) as waited:
            assert not waited


def test_other_problems_and_machines_do_not_wait(settings: Settings) -> None:
    with (
        tuning_lock(settings, KEYS[0], MACHINES[0]) as first,
        tuning_lock(settings, KEYS[1], MACHINES[0]) as second,
        tuning_lock(settings, KEYS[0], MACHINES[1]) as third,
    ):
        assert (first, second, third) == (False, False, False)


def test_second_process_waits_and_logs(settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held, holds = os.pipe()
    go, let_go = os.pipe()
    answer = tmp_path / "answer"

    def work() -> None:
        with tuning_lock(settings, KEYS[0], MACHINES[0]):
            os.write(holds, b"x")
            os.read(go, 1)
            answer.write_text("measured")

    child = fork(work)
    os.read(held, 1)
    waits: list[str] = []

    def on_wait() -> None:
        waits.append("waits")
        os.write(let_go, b"x")

    with (
        caplog.at_level(logging.INFO, logger="gemmtune"),
        tuning_lock(settings, KEYS[0], MACHINES[0], on_wait=on_wait) as waited,
    ):
        assert waited
        assert answer.read_text() == "measured"
    assert waits == ["waits"]
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "another process tunes this problem: waiting for its answer" in caplog.text
    assert status_of(child) == 0


def test_a_killed_process_holds_no_lock(settings: Settings) -> None:
    held, holds = os.pipe()

    def work() -> None:
        with tuning_lock(settings, KEYS[0], MACHINES[0]):
            os.write(holds, b"x")
            threading.Event().wait()

    child = fork(work)
    os.read(held, 1)
    kill(child)
    with tuning_lock(settings, KEYS[0], MACHINES[0]) as waited:
        assert not waited


def test_threads_exclude_each_other(settings: Settings) -> None:
    inside = 0
    most = 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with tuning_lock(settings, KEYS[0], MACHINES[0]):
            with guard:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.01)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_the_lock_is_released_when_the_block_raises(settings: Settings) -> None:
    with pytest.raises(KeyError), tuning_lock(settings, KEYS[0], MACHINES[0]):
        raise KeyError
    with tuning_lock(settings, KEYS[0], MACHINES[0]) as waited:
        assert not waited


def test_error_of_the_block_is_not_mistaken_for_a_lock_error(settings: Settings) -> None:
    with pytest.raises(OSError, match="of the block"), tuning_lock(settings, KEYS[0], MACHINES[0]):
        raise OSError("of the block")


def test_folder_without_locks_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(cache_dir=str(tmp_path / "file"))
    with one_warning(r"locks: got .*Not a directory.* in .*locks, expected a folder that supports lock files\. .* set cache_dir"):
        for _ in range(2):
            with tuning_lock(settings, KEYS[0], MACHINES[0]) as waited:
                assert not waited
