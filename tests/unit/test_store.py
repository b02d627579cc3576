"""Store: what is put is found again by exactly its key and fingerprint; illegal rows are refused; threads and forks share it."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import torch
from store_cases import KEYS, MACHINES, failure, in_child, row

from gemmtune.choice import Status
from gemmtune.errors import StoreError
from gemmtune.settings import Settings
from gemmtune.store.row import Ranged
from gemmtune.store.store import Store, close_stores, open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def store(path: Path) -> Store:
    return Store.open(path)


def test_rows_are_found_again_by_another_connection(store: Store, path: Path) -> None:
    rows = [row(0, baseline=True), row(1, finalist=True), failure(2), failure(3, Status.WRONG_RESULT, error_over_bound=7.5)]
    store.put(rows)
    assert store.rows(KEYS[0], MACHINES[0]) == {r.content_hash: r for r in rows}
    assert Store.open(path).rows(KEYS[0], MACHINES[0]) == {r.content_hash: r for r in rows}


@pytest.mark.parametrize("key", KEYS[1:])
def test_another_size_or_stride_is_a_miss(store: Store, key: str) -> None:
    store.put([row()])
    assert store.rows(key, MACHINES[0]) == {}


def test_another_machine_is_a_miss_and_is_listed(store: Store) -> None:
    store.put([row(measured_at="2024-01-01T00:00:00.000000+00:00")])
    store.put([row(fingerprint=MACHINES[1], measured_at="2024-01-02T00:00:00.000000+00:00")])
    assert store.rows(KEYS[0], '{"device":"another"}') == {}
    assert store.fingerprints(KEYS[0]) == [MACHINES[1], MACHINES[0]]
    assert store.fingerprints(KEYS[1]) == []


def test_put_replaces_the_row_of_the_same_choice(store: Store) -> None:
    store.put([row(0), row(1)])
    store.put([row(0, time_us=99.0)])
    assert {h: r.time_us for h, r in store.rows(KEYS[0], MACHINES[0]).items()} == {"hash0": 99.0, "hash1": 11.0}
    assert len(store.every_row()) == 2


def test_every_row_has_all_problems_and_machines(store: Store) -> None:
    rows = [row(i, key=key, fingerprint=machine) for i in range(2) for key in KEYS for machine in MACHINES]
    store.put(rows)
    assert {r.identity: r for r in store.every_row()} == {r.identity: r for r in rows}


def test_the_file_alone_is_the_whole_store_when_a_program_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of WAL mode lie in a second file until the last connection is closed."""
    monkeypatch.setattr("gemmtune.store.store._stores", {})
    used = open_store(Settings(store_path=str(tmp_path / "store.sqlite")))
    used.put(rows := [row()])
    close_stores()
    copy = shutil.copyfile(tmp_path / "store.sqlite", tmp_path / "copy.sqlite")
    assert Store.open(copy).every_row() == used.every_row() == rows


def test_lookups_do_not_read_the_file_until_somebody_writes(store: Store, path: Path) -> None:
    store.put([row()])
    store.rows(KEYS[0], MACHINES[0])
    statements: list[str] = []
    assert store._file is not None
    store._file.connection().set_trace_callback(statements.append)
    for _ in range(3):
        store.rows(KEYS[0], MACHINES[0])
    assert statements == ["PRAGMA data_version"] * 3
    other = Store.open(path)
    other.put([row(1)])
    assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0", "hash1"}


def test_limits_are_kept_by_machine(store: Store, path: Path) -> None:
    store.put_limits(MACHINES[0], {"bandwidth_gbps": 11, "float32_gflops": 150.5})
    store.put_limits(MACHINES[0], {"bandwidth_gbps": 12.0})
    assert Store.open(path).limits(MACHINES[0]) == {"bandwidth_gbps": 12.0, "float32_gflops": 150.5}
    assert store.limits(MACHINES[1]) == {}


def test_limits_are_separate_for_each_machine(store: Store) -> None:
    for machine, value in zip(MACHINES[:2], (1.0, 2.0), strict=True):
        store.put_limits(machine, {"bandwidth_gbps": value})
    assert [store.limits(machine) for machine in MACHINES[:2]] == [{"bandwidth_gbps": 1.0}, {"bandwidth_gbps": 2.0}]


def fact(value: dict[str, object], kind: str = "segments", **fields: str) -> Ranged:
    return Ranged(**({"key": KEYS[0], "fingerprint": MACHINES[0]} | fields), kind=kind, value=value)  # type: ignore[arg-type]


def test_records_for_all_rows_are_kept_by_class_machine_and_kind(store: Store, path: Path) -> None:
    assert store.ranged(KEYS[0], MACHINES[0]) == {}
    digest = store.digest()
    facts = [
        fact({"a": 1}),
        fact({"b": [2.5, None]}, "asked"),
        fact({"c": 3}, key=KEYS[1]),
        fact({"d": 4}, fingerprint=MACHINES[1]),
    ]
    for one in facts:
        store.put_ranged(one)
    for there in (store, Store.open(path)):
        assert there.ranged(KEYS[0], MACHINES[0]) == {"segments": facts[0], "asked": facts[1]}
        assert there.ranged(KEYS[1], MACHINES[1]) == {}
        assert {x.identity for x in there.every_ranged()} == {x.identity for x in facts}
    later = fact({"a": 2})
    store.put_ranged(later)
    assert store.ranged(KEYS[0], MACHINES[0])["segments"] == later
    assert len(store.every_ranged()) == 4
    assert store.digest() != digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": ""}, "kind: got ''"),
        ({"key": ""}, "key: got ''"),
        ({"value": [1]}, r"segments: got \[1\], expected a mapping of names to plain values"),
        ({"measured_at": "today"}, "measured_at: got 'today'"),
    ],
)
def test_an_illegal_record_for_all_rows_is_refused(fields: dict[str, object], message: str) -> None:
    legal = fact({"a": math.inf}).to_json()
    assert legal["value"] == {"a": "inf"}
    assert Ranged.from_json(legal) == fact({"a": "inf"}, measured_at=legal["measured_at"])
    with pytest.raises(StoreError, match=message):
        Ranged.from_json(legal | fields)
    with pytest.raises(StoreError, match=r"got fields .*, expected key, fingerprint, kind, value, measured_at"):
        Ranged.from_json({name: legal[name] for name in legal if name != "kind"})


def test_digest_follows_the_contents(store: Store, path: Path) -> None:
    seen = [store.digest()]
    for changed in (row(0), row(1), row(0, time_us=123.0)):
        store.put([changed])
        seen.append(store.digest())
    store.put_ranged(fact({"a": 1}))
    seen.append(store.digest())
    assert len(set(seen)) == len(seen)
    store.put_ranged(fact({"b": 1}, Ranged.FOR_GRAPHS))
    assert store.digest() == Store.open(path).digest() == seen[-1]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, "12", None])
def test_an_illegal_limit_is_refused(store: Store, value: object) -> None:
    with pytest.raises(StoreError, match=r"limit bandwidth_gbps: got .*expected a (finite )?number"):
        store.put_limits(MACHINES[0], {"bandwidth_gbps": value})  # type: ignore[dict-item]
    assert store.limits(MACHINES[0]) == {}


@pytest.mark.parametrize("time_us", [None, 0.0, -3.0, math.inf, math.nan])
def test_status_ok_needs_a_finite_positive_time(time_us: float | None) -> None:
    with pytest.raises(StoreError, match=r"time_us of triton:mm_0: got .* with status ok, expected a finite number above 0"):
        row(time_us=time_us)


@pytest.mark.parametrize("time_us", [1.0, math.inf])
def test_a_failure_has_no_time(time_us: float) -> None:
    with pytest.raises(StoreError, match=r"got .* with status timed_out, expected None: failures have no time"):
        failure(time_us=time_us)


def test_an_infinite_error_of_a_failure_is_not_kept() -> None:
    assert failure(status=Status.WRONG_RESULT, error_over_bound=math.inf).error_over_bound is None
    with pytest.raises(StoreError, match=r"error_over_bound of triton:mm_0: got inf with status ok, expected a finite number"):
        row(error_over_bound=math.inf)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"status": "fine"}, r"status: got 'fine', expected one of ok, refused, compile_error"),
        ({"content_hash": ""}, r"content_hash: got '', expected a text of at least one character"),
        ({"time_us": "3"}, r"time_us: got '3', expected a number"),
        ({"info": [1]}, r"info of triton:mm_0: got \[1\], expected a mapping"),
        ({"measured_at": "yesterday"}, r"measured_at: got 'yesterday', expected a time in UTC such as 20"),
        ({"measured_at": "2024-01-01T00:00:00+00:00"}, r"measured_at: got .*, expected a time in UTC"),
        ({"measured_at": "2024-01-01T00:00:00.000000+02:00"}, r"measured_at: got .*, expected a time in UTC"),
    ],
)
def test_an_illegal_row_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        row(**fields)


def test_info_and_reason_keep_what_json_and_text_allow(store: Store) -> None:
    kept = failure(
        info={"tile": (64, 32), "acc": torch.float32, "ratio": math.inf, "deep": {"x": None}}, reason="bad \udcff byte \0"
    )
    store.put([kept])
    (found,) = store.rows(KEYS[0], MACHINES[0]).values()
    assert found == kept
    assert found.info == {"tile": [64, 32], "acc": "torch.float32", "ratio": "inf", "deep": {"x": None}}
    assert found.reason == r"bad \udcff byte \x00"


def test_open_store_is_one_for_each_file(tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path))
    assert open_store(settings) is open_store(Settings(store_path=str(tmp_path / "store.sqlite")))
    assert open_store(settings) is not open_store(Settings(store_path=str(tmp_path / "other.sqlite")))


def test_a_closed_store_opens_again(store: Store) -> None:
    store.put([row()])
    store.close()
    assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0"}


def test_a_removed_file_is_made_again(store: Store, path: Path) -> None:
    store.put([row(0)])
    for file in path.parent.glob("store.sqlite*"):
        file.unlink()
    assert store.rows(KEYS[0], MACHINES[0]) == {}
    store.put([row(1)])
    assert set(Store.open(path).rows(KEYS[0], MACHINES[0])) == {"hash1"}


def test_an_interrupted_put_leaves_nothing_of_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put([row(0)])
    file = store._file
    assert file is not None
    monkeypatch.setattr(file, "_scope", lambda key, fingerprint: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.put([row(1)])
    monkeypatch.undo()
    assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0"}
    store.put([row(2)])
    assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0", "hash2"}


def test_threads_share_a_store(store: Store) -> None:
    def work(thread: int) -> None:
        for i in range(20):
            store.put([row(100 * thread + i, key=KEYS[thread % 4])])
            assert f"hash{100 * thread + i}" in store.rows(KEYS[thread % 4], MACHINES[0])

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.every_row()) == 160


def test_forked_process_opens_a_separate_connection(store: Store) -> None:
    store.put([row(0)])

    def work() -> None:
        assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0"}
        store.put([row(1)])

    in_child(work)
    store.put([row(2)])
    assert set(store.rows(KEYS[0], MACHINES[0])) == {"hash0", "hash1", "hash2"}


@pytest.mark.turn(6, 8)
def test_a_fork_waits_for_other_threads_to_leave_the_store(store: Store) -> None:
    stop = threading.Event()

    def work() -> None:
        i = 0
        while not stop.is_set():
            store.put([row(i % 50)])
            i += 1
            time.sleep(0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for i in range(10):
            in_child(lambda i=i: store.put([row(1000 + i)]))
    finally:
        stop.set()
        thread.join()
    assert {f"hash{1000 + i}" for i in range(10)} <= set(store.rows(KEYS[0], MACHINES[0]))


def test_health_of_a_whole_store(store: Store, path: Path) -> None:
    store.put([row(0), failure(1), row(0, key=KEYS[1])])
    health = store.health()
    assert (health.path, health.state, health.scopes, health.rows, health.detail) == (path, "file", 2, 3, "")
    assert health.journal_mode in ("wal", "delete")
    assert health.size_bytes == os.path.getsize(path) > 0


def test_every_failure_status_can_be_stored(store: Store) -> None:
    rows = [failure(i, status) for i, status in enumerate(Status) if status is not Status.OK]
    store.put(rows)
    assert {r.status for r in store.rows(KEYS[0], MACHINES[0]).values()} == set(Status) - {Status.OK}


def test_the_file_is_plain_sqlite_that_other_tools_can_read(store: Store, path: Path) -> None:
    store.put([row(0)])
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name, time_us, status FROM measurements").fetchall() == [("triton:mm_0", 10.0, "ok")]
    connection.close()


def test_leftovers_of_a_killed_process_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.with_name(f"{path.name}.new-{os.getpid()}").write_text("half of a file")
    store = Store.open(path)
    store.put([row()])
    assert (len(store.every_row()), store.health().size_bytes) == (1, path.stat().st_size)
    assert Store().health().size_bytes == 0


def test_a_file_of_the_first_version_gets_its_table_of_all_rows_when_it_is_written(tmp_path: Path) -> None:
    path, fact = tmp_path / "store.sqlite", Ranged(key=KEYS[0], fingerprint=MACHINES[0], kind="asked", value={"rows": [3]})
    store = Store.open(path)
    store.put([row()])
    store.put_ranged(fact)
    store.close()
    before = Store.open(path, read_only=True)
    assert (before.every_ranged(), before.writable) == ([fact], False)
    before.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE ranged")
    connection.close()
    before = Store.open(path, read_only=True)
    assert (before.every_ranged(), len(before.every_row())) == ([], 1)
    before.close()
    store = Store.open(path)
    store.put_ranged(fact)
    assert store.writable
    store.close()
    assert Store.open(path).every_ranged() == [fact]
