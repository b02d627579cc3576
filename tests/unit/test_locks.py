"""tuning_lock: one process tunes a problem, others wait for it; the dead hold nothing; no folder, no lock, one warning."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
from store_cases import KEYS, MACHINES, fork, kill, one_warning, row, status_of

from gemmtune.cache import locking
from gemmtune.device import detect
from gemmtune.errors import StoreError
from gemmtune.selector.locks import tuning_lock
from gemmtune.settings import Settings, use
from gemmtune.store.store import Store
from gemmtune.timing.timer import device_to_itself
from gemmtune.toolchain.made_once import made_once


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


def test_what_interrupts_a_holder_goes_on_and_leaves_the_lock(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """A signal handler runs in the thread that it interrupts, which cannot release a lock meanwhile."""
    caplog.set_level(logging.INFO, "gemmtune")
    with tuning_lock(settings, "mm 1", "machine"):
        with tuning_lock(settings, "mm 1", "machine") as waited, use(settings), device_to_itself(settings, detect("cpu")):
            assert not waited
        found: list[object] = []
        other = threading.Thread(target=lambda: found.append(_locked_elsewhere(settings)))
        other.start()
        other.join()
    assert found == [True]
    assert not caplog.messages


def _locked_elsewhere(settings: Settings) -> bool:
    (path,) = Path(str(settings.cache_dir)).glob("locks/[0-9a-f]*.lock")
    try:
        with locking.file_lock(path, 0):
            return False
    except filelock.Timeout:
        return True


def test_the_lock_is_released_when_the_block_raises(settings: Settings) -> None:
    with pytest.raises(KeyError), tuning_lock(settings, KEYS[0], MACHINES[0]):
        raise KeyError
    with tuning_lock(settings, KEYS[0], MACHINES[0]) as waited:
        assert not waited


def test_error_of_the_block_is_not_mistaken_for_a_lock_error(settings: Settings) -> None:
    with pytest.raises(OSError, match="of the block"), tuning_lock(settings, KEYS[0], MACHINES[0]):
        raise OSError("of the block")


@pytest.mark.parametrize("temporary", ["", "missing"])
def test_without_a_cache_folder_a_temporary_one_or_nothing_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / temporary))
    settings = Settings(cache_dir=str(tmp_path / "file"))
    with tuning_lock(settings, KEYS[0], MACHINES[0]) as waited:
        assert not waited
        assert len(list(tmp_path.glob("gemmtune-*/locks/*.lock"))) == (not temporary)


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file system without locks, as far as ``flock`` goes. The message of its error."""

    def flock(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(locking, "_warned", set())
    locking._has_locks.cache_clear()
    yield os.strerror(request.param)
    locking._has_locks.cache_clear()


def test_without_locks_everything_goes_on_with_one_warning(settings: Settings, tmp_path: Path, no_locks: str) -> None:
    words = rf"locks: got \[Errno \d+\] {no_locks} in .*, expected a file system with locks\. .* local file system\."
    with one_warning(words), use(settings):
        for number in range(2):
            with tuning_lock(settings, KEYS[0], MACHINES[0]) as waited, device_to_itself(settings, detect("cpu")):
                assert not waited
            path = made_once(("cpp", f"{number}.so"), lambda made: made.write_text("compiled") and None, "a kernel")
            assert path.read_text() == "compiled"
            assert not [x for x in path.parent.iterdir() if x.suffix not in (".so", ".lock")]


def test_new_store_without_locks_is_refused_at_once(tmp_path: Path, no_locks: str) -> None:
    """SQLite would wait for a lock until its time-out."""
    words = "No locks available.*Use a local file system, or set store_path"
    with one_warning("locks: got "), pytest.raises(StoreError, match=words):
        Store.open(tmp_path / "store.sqlite")


def test_store_without_locks_is_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.sqlite"
    with contextlib.closing(Store.open(path)) as store:
        store.put([row()])
    for module in ("database", "storefile"):
        monkeypatch.setattr(f"gemmtune.store.{module}.has_locks", lambda _: False)
    store = Store.open(path)
    assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0"}
    assert not store.writable
    with one_warning("which can be read but not written, expected a file system with locks. Use a local file system, or"):
        store.put([row(1)])
    assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0", "hash1"}
