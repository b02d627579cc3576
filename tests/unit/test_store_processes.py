"""Many processes and one store: nothing is lost, a kill leaves it whole."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest
import rotation
from store_cases import KEYS, MACHINES, fork, kill, row, status_of

from gemmtune.settings import Settings
from gemmtune.store.database import Database
from gemmtune.store.health import check
from gemmtune.store.key import canonical
from gemmtune.store.row import Row
from gemmtune.store.store import Store, open_store

PER_PROBLEM = 5
KILLS = 20
"""At moments that are other ones for each commit."""


def problem_rows(number: int) -> list[Row]:
    return [row(i, key=canonical({"problem": number})) for i in range(PER_PROBLEM)]


def assert_whole(path: Path) -> None:
    """SQLite finds nothing wrong, nor do the checksums; nobody has set anything aside."""
    check(Database(path, read_only=True))
    assert list(path.parent.glob("*.corrupt-*")) == []


@pytest.mark.turn(3, 8)
def test_sixteen_writers_lose_nothing(tmp_path: Path) -> None:
    """They start together on a store that does not exist yet."""
    settings = Settings(cache_dir=str(tmp_path / "cache"))
    gate, opened = os.pipe()

    def work(process: int) -> None:
        os.close(opened)
        os.read(gate, 1)
        for i in range(10):
            open_store(settings).put(problem_rows(100 * process + i))

    children = [fork(lambda p=p: work(p)) for p in range(16)]
    os.close(opened)
    os.close(gate)
    assert [status_of(child) for child in children] == [0] * 16
    path = settings.store_file
    store = Store.open(path)
    expected = [r.identity for p in range(16) for i in range(10) for r in problem_rows(100 * p + i)]
    assert sorted(r.identity for r in store.every_row()) == sorted(expected)
    assert_whole(path)


@pytest.mark.turn(2, 8)
def test_sixteen_writers_of_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    children = [fork(lambda p=p: Store.open(path).put([row(p)])) for p in range(16)]
    assert [status_of(child) for child in children] == [0] * 16
    assert set(Store.open(path).rows(KEYS[0], MACHINES[0])) == {f"hash{p}" for p in range(16)}


@pytest.mark.turn(7, 8)
def test_kills_leave_a_whole_store(tmp_path: Path) -> None:
    """A writer is killed at a random moment. What it reported as put is there, and no problem is there in part."""
    path = tmp_path / "store.sqlite"
    numbers = itertools.count()
    reported: set[int] = set()
    chance = random.Random(os.environ[rotation.VARIABLE])
    for _ in range(KILLS):
        start = next(numbers) * 100_000
        read, write = os.pipe()

        def work(start: int = start, write: int = write) -> None:
            store = Store.open(path)
            for number in itertools.count(start):
                store.put(problem_rows(number))
                os.write(write, number.to_bytes(8, "little"))

        child = fork(work)
        os.close(write)
        readable = select.poll()  # select takes only low numbers of descriptors
        readable.register(read, select.POLLIN)
        readable.poll(10_000 if chance.random() < 0.8 else 0)
        time.sleep(chance.random() * 0.01)
        kill(child)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        reported |= {int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)}
    store = Store.open(path)
    assert_whole(path)
    counts: dict[str, int] = {}
    for found in store.every_row():
        counts[found.key] = counts.get(found.key, 0) + 1
    assert set(counts.values()) == {PER_PROBLEM}
    assert len(reported) > KILLS // 2
    assert {canonical({"problem": number}) for number in reported} <= set(counts)


@pytest.mark.turn(0, 8)
def test_kills_during_the_making_of_a_store(tmp_path: Path) -> None:
    chance = random.Random(os.environ[rotation.VARIABLE])
    for number in range(KILLS // 2):
        path = tmp_path / str(number) / "store.sqlite"
        child = fork(lambda path=path: [Store.open(path).put([row(i)]) for i in itertools.count()])
        time.sleep(chance.random() * 0.01)
        kill(child)
        store = Store.open(path)
        store.put([row(7)])
        assert "hash7" in store.rows(KEYS[0], MACHINES[0])
        assert_whole(path)


def test_a_writer_that_dies_in_a_transaction_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = Store.open(path)
    store.put([row(0)])

    def work() -> None:
        database = Database(path)
        with database.transaction():
            database.write([row(0, time_us=77.0), *(row(i) for i in range(1, 500))])
            os.kill(os.getpid(), signal.SIGKILL)

    assert status_of(fork(work)) == -signal.SIGKILL
    assert store.rows(KEYS[0], MACHINES[0]) == {"hash0": store.every_row()[0]}
    assert store.every_row()[0].time_us == 10.0
    store.put([row(1)])
    assert set(Store.open(path).rows(KEYS[0], MACHINES[0])) == {"hash0", "hash1"}


@pytest.mark.turn(3, 8)
@pytest.mark.filterwarnings("ignore:store. got a corrupt file")
def test_processes_that_find_the_same_corruption_set_it_aside_once(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"garbage" * 1000)
    settings = Settings(store_path=str(path))
    children = [fork(lambda p=p: open_store(settings).put([row(p)])) for p in range(8)]
    assert [status_of(child) for child in children] == [0] * 8
    assert set(Store.open(path).rows(KEYS[0], MACHINES[0])) == {f"hash{p}" for p in range(8)}
    assert [p.name for p in tmp_path.glob("*corrupt-?")] == ["store.sqlite.corrupt-1"]
