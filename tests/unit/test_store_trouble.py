"""A store that cannot be used as asked: one warning that says what was got, what was expected and what to do; work goes on."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sqlite3
import warnings
from pathlib import Path

import pytest
from namespaces import mounted
from store_cases import KEYS, MACHINES, NOBODY, in_child, journals, one_warning, row

from gemmtune.errors import StoreError
from gemmtune.settings import Settings
from gemmtune.store import storefile
from gemmtune.store.database import Database
from gemmtune.store.health import set_aside
from gemmtune.store.row import Ranged
from gemmtune.store.store import Store, open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def filled(path: Path, count: int = 3) -> None:
    """A store with rows, all of them in the main file."""
    store = Store.open(path)
    store.put([row(i) for i in range(count)])
    store.close()


def hashes(store: Store) -> set[str]:
    return set(store.rows(KEYS[0], MACHINES[0]))


def settings_for(path: Path) -> Settings:
    return Settings(store_path=str(path))


def test_garbage_is_moved_aside_with_one_warning(path: Path) -> None:
    path.write_bytes(b"no database " * 400)
    message = r"got a corrupt file at .*store\.sqlite \(file is not a database\), expected .*store\.sqlite\.corrupt-1,"
    with one_warning(message + " and a new store has been made"):
        store = open_store(settings_for(path))
    store.put([row()])
    assert hashes(store) == {"hash0"}
    assert path.with_name("store.sqlite.corrupt-1").read_bytes() == b"no database " * 400
    assert hashes(Store.open(path)) == {"hash0"}


def test_a_second_corrupt_file_gets_the_next_number(path: Path) -> None:
    for number in (1, 2):
        path.write_bytes(b"no database " * 400)
        with one_warning(rf"It was renamed to .*\.corrupt-{number}, and"):
            Store(Database(path)).rows(KEYS[0], MACHINES[0])


def test_a_file_that_is_no_database_by_its_name_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("My thesis. " * 400)
    with one_warning(r"got .*thesis\.txt, which is not an SQLite database, expected .* \.sqlite, .*Set store_path"):
        store = open_store(settings_for(path))
    store.put([row()])
    assert hashes(store) == {"hash0"}
    assert path.read_text() == "My thesis. " * 400


def test_a_file_that_cannot_be_read_is_not_set_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)

    def fails(_database: Database) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("gemmtune.store.health.check", fails)
    with pytest.raises(OSError, match="Input/output"):
        set_aside(Database(path))
    assert path.exists()


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    Store.open(path).put([row()])
    assert hashes(Store.open(path)) == {"hash0"}


def test_a_flipped_bit_in_a_row_is_corruption(path: Path) -> None:
    filled(path)
    data = path.read_bytes()
    assert data.count(b"triton:mm_1") == 1
    damaged = data.replace(b"triton:mm_1", b"triton:mm_3")
    path.write_bytes(damaged)
    store = open_store(settings_for(path))
    with one_warning(r"got a corrupt file at .* \(a measurement does not match its checksum\).* measured again"):
        assert hashes(store) == set()
    assert path.with_name("store.sqlite.corrupt-1").read_bytes() == damaged
    store.put([row(1)])
    assert hashes(Store.open(path)) == {"hash1"}


def test_rows_moved_to_another_key_are_a_miss(path: Path) -> None:
    filled(path)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE scopes SET key = ?", (KEYS[1],))
    store = Store.open(path)
    with one_warning("a measurement does not match its checksum"):
        assert store.rows(KEYS[1], MACHINES[0]) == {}


def test_a_record_for_all_rows_that_nobody_wrote_is_a_miss(path: Path) -> None:
    store = Store.open(path)
    store.put_ranged(Ranged(key=KEYS[0], fingerprint=MACHINES[0], kind="segments", value={"a": 1}))
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE ranged SET value = '{}'")
    with one_warning("a record for all M does not match its checksum"):
        assert Store.open(path).ranged(KEYS[0], MACHINES[0]) == {}


def test_a_limit_that_nobody_measured_is_a_miss(path: Path) -> None:
    store = Store.open(path)
    store.put_limits(MACHINES[0], {"bandwidth_gbps": 12, "float32_gflops": 100})
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE limits SET value = 1e9 WHERE name = 'bandwidth_gbps'")
    with one_warning("a measured limit does not match its checksum"):
        assert Store.open(path).limits(MACHINES[0]) == {}


def test_a_corrupt_file_that_is_read_only_stays_and_memory_serves(path: Path) -> None:
    filled(path)
    before = path.read_bytes().replace(b"triton:mm_1", b"triton:mm_3")
    path.write_bytes(before)
    store = Store(Database(path, read_only=True))
    with one_warning(r"got 'a measurement does not match its checksum' from .* kept in memory"):
        assert hashes(store) == set()
        store.put([row(7)])
        assert hashes(store) == {"hash7"}
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.glob("*corrupt*")] == []


def test_a_truncated_file_is_replaced(path: Path) -> None:
    filled(path, 400)
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    with one_warning("got a corrupt file"):
        store = open_store(settings_for(path))
        assert hashes(store) <= {f"hash{i}" for i in range(400)}
    store.put([row(1000)])
    assert "hash1000" in hashes(Store.open(path))


def test_corruption_that_shows_while_the_store_is_open_is_seen(path: Path) -> None:
    store = open_store(settings_for(path))
    store.put([row(i) for i in range(3)])
    store.close()
    path.write_bytes(b"\0" * 5000)
    with one_warning("got a corrupt file"):
        store.put([row(7)])
    assert hashes(Store.open(path)) == {"hash7"}


def test_a_newer_store_is_refused_and_left_alone(path: Path) -> None:
    filled(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    message = r"got schema version 99 in .*store\.sqlite, expected at most 1: a newer gemmtune wrote it\. Upgrade gemmtune, or set"
    with one_warning(message + r".* kept in memory"):
        store = open_store(settings_for(path))
        store.put([row(9)])
        assert hashes(store) == {"hash9"}
    assert path.read_bytes() == before
    assert store.health().state == "memory"
    with pytest.raises(StoreError, match=message):
        Store.open(path)


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with one_warning(r"got .*, an SQLite database of another program, expected one of gemmtune\. Set store_path"):
        store = open_store(settings_for(path))
    store.put([row()])
    assert hashes(store) == {"hash0"}
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with one_warning(r"got .*Not a directory.* expected .*\. Check its folder and this user's perm"):
        store = open_store(settings_for(tmp_path / "file" / "store.sqlite"))
        store.put([row()])
        store.put([row(1)])
        assert hashes(store) == {"hash0", "hash1"}


@pytest.mark.timeout(20)  # of a lock that is tried again it would be half a minute
def test_unwritable_folder_is_reported_at_once() -> None:
    with one_warning(r"got .*No such file or directory: '/proc/store\.sqlite.* Check its folder and this user's permissions"):
        store = open_store(settings_for(Path("/proc/store.sqlite")))
        store.put([row()])
    assert hashes(store) == {"hash0"}


def test_warning_points_to_the_opening_line(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="a device, pipe or folder, expected a file") as caught:
        open_store(settings_for(tmp_path))
    assert [warning.filename for warning in caught] == [__file__]


def test_a_path_that_is_a_folder(tmp_path: Path) -> None:
    with one_warning(r"a device, pipe or folder, expected a file"):
        store = open_store(settings_for(tmp_path))
    store.put([row()])
    assert hashes(store) == {"hash0"}


def test_no_permission_for_the_folder(open_folder: Path) -> None:
    (open_folder / "private").mkdir(mode=0o700 if os.getuid() == 0 else 0o000)

    def work() -> None:
        with one_warning(r"got .*[Pp]ermission denied.* Check its folder and this user's permissions"):
            store = open_store(settings_for(open_folder / "private" / "store.sqlite"))
            store.put([row()])
        assert hashes(store) == {"hash0"}

    in_child(work, user=NOBODY)
    (open_folder / "private").chmod(0o755)


@pytest.mark.parametrize("with_journal", [False, True], ids=["closed", "in-use"])
def test_a_read_only_folder_is_still_read(open_folder: Path, with_journal: bool) -> None:
    path = open_folder / "store.sqlite"
    store = Store.open(path)
    store.put([row(0), row(1)])
    if not with_journal:
        store.close()
    for file in open_folder.iterdir():
        file.chmod(0o444)
    open_folder.chmod(0o555)

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shared = open_store(settings_for(path))
            found = hashes(shared)
        with one_warning(r"store\.sqlite, which can be read but not written, expected .* Give this"):
            shared.put([row(7)])
            shared.put([row(8)])
        assert hashes(shared) == found | {"hash7", "hash8"}
        assert with_journal or found == {"hash0", "hash1"}
        assert shared.health().state == "read-only"
        with pytest.raises(StoreError, match="can be read but not written"):
            shared.merge(path)

    in_child(work, user=NOBODY)
    open_folder.chmod(0o755)
    store.close()
    assert hashes(Store.open(path)) == {"hash0", "hash1"}


def test_a_full_disk_by_sqlites_own_limit(path: Path) -> None:
    store = open_store(settings_for(path))
    store.put([row(0)])
    assert store._file is not None
    connection = store._file.connection()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with one_warning(r"got 'database or disk is full' from .*\. Free some space there, or set store"):
        store.put([row(i) for i in range(1, 300)])
        store.put([row(300)])
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")  # it is closed: what is read from now on, is read only
    assert hashes(store) == {f"hash{i}" for i in range(301)}
    assert hashes(Store.open(path)) == {"hash0"}
    assert store.health().state == "read-only"


def test_a_file_that_may_not_grow(path: Path) -> None:
    filled(path)

    def work() -> None:
        store = open_store(settings_for(path))
        hashes(store)
        size = sum(p.stat().st_size for p in journals(path)) + 20_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with one_warning(r"store: got '(disk I/O error|database or disk is full)' from .*space"):
            store.put([row(i) for i in range(500)])
        assert hashes(store) == {f"hash{i}" for i in range(500)}

    in_child(work)
    assert hashes(Store.open(path)) == {"hash0", "hash1", "hash2"}


def test_a_store_that_a_full_disk_ends_leaves_no_file(path: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        with one_warning(r"store: got '(disk I/O error|database or disk is full)' from .*space"):
            open_store(settings_for(path)).put([row(0)])

    in_child(work)
    assert [x.name for x in path.parent.iterdir() if x.name.startswith(path.name)] == [f"{path.name}.lock"]


def fill(folder: Path) -> Path:
    """Write a file that takes all of the space that is left."""
    room = os.statvfs(folder)
    file = folder / "fill"
    file.write_bytes(bytes(room.f_bavail * room.f_frsize))
    return file


@pytest.mark.parametrize("pages", [2, 4, 8, 12, 16])
def test_a_store_that_a_full_disk_ends_is_not_taken_for_a_corrupt_one(path: Path, pages: int) -> None:
    def work() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            open_store(settings_for(path)).put([row(0)])
        [said] = [str(x.message) for x in caught]
        assert re.search(r"Free some space|Check the disk and its free space", said), said
        names = {x.name for x in path.parent.iterdir()}
        assert names <= {path.name + end for end in ("", ".lock", "-wal", "-shm")}, names

    mounted(work, {}, sizes={path.parent: pages * 4096})


def test_a_store_on_a_full_disk_is_read(path: Path) -> None:
    def work() -> None:
        filled(path)
        room = fill(path.parent)
        store = open_store(settings_for(path))
        assert hashes(store) == {"hash0", "hash1", "hash2"}
        with one_warning(r"can be read but not written, expected free space there\. Free some space, or set store"):
            store.put([row(7)])
        with pytest.raises(StoreError, match="expected free space there"):
            store.merge(path)
        assert hashes(store) == {"hash0", "hash1", "hash2", "hash7"}
        room.unlink()
        assert hashes(Store.open(path)) == {"hash0", "hash1", "hash2"}

    mounted(work, {}, sizes={path.parent: 200_000})


def test_a_lock_that_is_held_too_long(path: Path) -> None:
    filled(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    store = Store.open(path, busy_timeout_s=0.05)
    with one_warning(r"got 'database is locked' from .* End the process that keeps it locked, or"):
        store.put([row(7)])
        store.put([row(8)])
    holder.execute("ROLLBACK")
    holder.close()
    assert hashes(store) == {"hash0", "hash1", "hash2", "hash7", "hash8"}


def test_open_of_a_missing_file_to_read_it_only(path: Path) -> None:
    with pytest.raises(StoreError, match=r"got .*store\.sqlite, which does not exist, expected a store file of gemmtune"):
        Store.open(path, read_only=True)
    assert not path.exists()


def test_open_of_a_corrupt_file_says_so_and_moves_nothing(path: Path) -> None:
    path.write_bytes(b"no database " * 400)
    with pytest.raises(StoreError, match=r"got 'file is not a database' from .*\. Delete it if it is a store, or set store_path"):
        Store.open(path)
    assert path.read_bytes() == b"no database " * 400


def test_a_journal_whose_store_is_gone_is_not_played_into_a_new_one(path: Path) -> None:
    store = Store.open(path)
    store.put([row(i) for i in range(100)])
    wal = path.with_name("store.sqlite-wal")
    old = wal.read_bytes()
    store.close()
    for file in path.parent.glob("store.sqlite*"):
        file.unlink()
    wal.write_bytes(old)
    fresh = Store.open(path)
    assert fresh.every_row() == []
    fresh.health()
    assert [p.name for p in path.parent.glob("*corrupt*")] == []


def test_a_schema_that_is_no_text_is_corruption(path: Path) -> None:
    """SQLite quotes the schema in its message, which Python then cannot decode."""
    filled(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE measurements", b"CREATE TABLE \xc1easurements"))
    with one_warning(r"got a corrupt file at "):
        store = open_store(settings_for(path))
        store.put([row(7)])
    assert "hash7" in hashes(Store.open(path))


@pytest.mark.parametrize(
    ("folder", "network"),
    [
        ("/", False), ("/home/me", False), ("/net", True), ("/net/me/cache", True), ("/network", False), ("/net/local", False),
        ("/net/local/me", False), ("/my files/me", True), ("/my", False),
    ],
)  # fmt: skip
def test_network_folders_are_recognised_by_the_nearest_mount(folder: str, network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [
        "/dev/a / ext4 rw 0 0", "host:/x /net nfs4 rw 0 0", "/dev/b /net/local ext4 rw 0 0", "//host/y /my\\040files cifs rw 0 0",
    ]  # fmt: skip
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "\n".join(mounts))
    assert storefile._on_network(Path(folder)) == network
    monkeypatch.setattr(Path, "read_text", unreadable)
    assert not storefile._on_network(Path(folder))


def unreadable(*_: object, **__: object) -> str:
    raise FileNotFoundError("there is no such list")


def test_new_store_folders_are_private(tmp_path: Path) -> None:
    Store.open(tmp_path / "a" / "b" / "store.sqlite").put([row(0)])
    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


@pytest.mark.parametrize(("network", "mode"), [(True, "delete"), (False, "wal")])
def test_a_store_that_several_hosts_may_use_has_a_journal_that_needs_no_shared_memory(
    network: bool, mode: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storefile, "_on_network", lambda folder: network)
    Store.open(path).put([row(0)])
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (mode,)
