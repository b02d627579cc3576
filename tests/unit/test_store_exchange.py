"""Export, import and merge: everything arrives, the later measurement stays, garbage is refused whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from store_cases import KEYS, MACHINES, failure, row

from gemmtune.errors import StoreError
from gemmtune.store.row import Ranged
from gemmtune.store.store import Absorbed, Store

EARLY, LATE = (f"2024-01-0{day}T00:00:00.000000+00:00" for day in (1, 2))


@pytest.fixture
def one(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "one.sqlite")


@pytest.fixture
def two(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "two.sqlite")


@pytest.fixture
def exported(tmp_path: Path, one: Store) -> Path:
    one.put([row(0), failure(1), row(2, key=KEYS[1]), row(3, fingerprint=MACHINES[1], info={"epilogue": -math.inf})])
    one.put_limits(MACHINES[0], {"bandwidth_gbps": 12.0})
    one.put_ranged(Ranged(key=KEYS[0], fingerprint=MACHINES[0], kind="asked", value={"rows": [3]}))
    path = tmp_path / "export.json"
    assert one.export_file(path) == 4
    return path


def contents(store: Store) -> dict[tuple[str, str, str], object]:
    return {r.identity: r for r in store.every_row()}


def test_import_restores_the_export(exported: Path, one: Store, two: Store) -> None:
    assert two.import_file(exported) == Absorbed(added=4)
    assert contents(two) == contents(one)
    assert two.limits(MACHINES[0]) == {"bandwidth_gbps": 12.0}
    assert two.every_ranged() == one.every_ranged()
    assert two.import_file(exported) == Absorbed(kept=4)


def test_an_export_is_strict_json_and_always_the_same(exported: Path, one: Store, tmp_path: Path) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    data = json.loads(exported.read_text(), parse_constant=refuse)
    assert (data["format"], data["version"]) == ("gemmtune-store", 1)
    one.export_file(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == exported.read_bytes()


def test_later_row_wins(one: Store, two: Store) -> None:
    one.put([row(0, measured_at=LATE, time_us=1.0), row(1, measured_at=EARLY, time_us=1.0), row(2, measured_at=EARLY, time_us=1.0)])
    two.put([row(0, measured_at=EARLY, time_us=2.0), row(1, measured_at=LATE, time_us=2.0), row(3, measured_at=EARLY, time_us=2.0)])
    assert two.path is not None
    assert one.merge(two.path) == Absorbed(added=1, replaced=1, kept=1)
    times = {h: r.time_us for h, r in one.rows(KEYS[0], MACHINES[0]).items()}
    assert times == {"hash0": 1.0, "hash1": 2.0, "hash2": 1.0, "hash3": 2.0}
    assert len(two.every_row()) == 3


def test_rows_of_other_machines_never_conflict(one: Store, two: Store) -> None:
    one.put([row(measured_at=EARLY)])
    two.put([row(measured_at=LATE, fingerprint=MACHINES[1])])
    assert two.path is not None
    assert one.merge(two.path) == Absorbed(added=1)
    assert set(one.fingerprints(KEYS[0])) == set(MACHINES)


def test_merge_takes_later_limits(one: Store, two: Store) -> None:
    one.put_limits(MACHINES[0], {"bandwidth_gbps": 1.0})
    two.put_limits(MACHINES[0], {"bandwidth_gbps": 2.0, "float32_gflops": 3.0})
    assert two.path is not None
    one.merge(two.path)
    assert one.limits(MACHINES[0]) == {"bandwidth_gbps": 2.0, "float32_gflops": 3.0}


def test_later_record_for_all_rows_wins(one: Store, two: Store, tmp_path: Path) -> None:
    def fact(value: int, measured_at: str, kind: str = "segments") -> Ranged:
        return Ranged(key=KEYS[0], fingerprint=MACHINES[0], kind=kind, value={"value": value}, measured_at=measured_at)

    def values() -> dict[str, int]:
        return {kind: found.value["value"] for kind, found in one.ranged(KEYS[0], MACHINES[0]).items()}

    for kind, here, there in (("early", EARLY, LATE), ("late", LATE, EARLY), ("same", EARLY, EARLY)):
        one.put_ranged(fact(1, here, kind))
        two.put_ranged(fact(2, there, kind))
    two.put_ranged(fact(2, EARLY, "new"))
    assert two.path is not None
    one.merge(two.path)
    assert values() == {"early": 2, "late": 1, "same": 1, "new": 2}
    two.put_ranged(fact(3, "2024-01-03T00:00:00.000000+00:00", "late"))
    two.export_file(tmp_path / "export.json")
    one.import_file(tmp_path / "export.json")
    assert values() == {"early": 2, "late": 3, "same": 1, "new": 2}


def test_merge_of_a_missing_or_damaged_store_is_an_error(one: Store, tmp_path: Path) -> None:
    one.put([row()])
    with pytest.raises(StoreError, match=r"got .*nowhere\.sqlite, which does not exist, expected a store file"):
        one.merge(tmp_path / "nowhere.sqlite")
    (tmp_path / "bad.sqlite").write_text("garbage " * 1000)
    with pytest.raises(StoreError, match=r"got 'file is not a database' from .*bad\.sqlite.*or name another file\."):
        one.merge(tmp_path / "bad.sqlite")
    assert (tmp_path / "bad.sqlite").read_text() == "garbage " * 1000
    assert len(one.every_row()) == 1


def test_import_into_a_store_without_a_file_is_an_error(exported: Path) -> None:
    with pytest.raises(StoreError, match="expected a writable file"):
        Store().import_file(exported)


def edited(path: Path, *place: Any, value: object) -> Path:
    """The exported file with the value at a place replaced."""
    data = json.loads(path.read_text())
    at = data
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    path.write_text(json.dumps(data))
    return path


WRONG_ENTRIES = [
    (("format",), "other", r"format: got 'other', expected 'gemmtune-store', as gemmtune export writes it"),
    (("version",), 2, r"version: got 2, expected 1; import it with the gemmtune that wrote it"),
    (("extra",), 1, r"got an object with extra, format, .*, expected one with format, version, measurements, limits"),
    (("measurements",), {}, r"measurements: got \{\}, expected a list"),
    (("measurements", 1), [], r"measurements\[1\]: got \[\], expected an object with key, fingerprint, rows"),
    (("measurements", 0, "key"), "{ }", r"measurements\[0\]\.key: got '\{ \}', expected the canonical JSON text"),
    (("measurements", 0, "fingerprint"), 3, r"measurements\[0\]\.fingerprint: got 3, expected the canonical JSON text"),
    (("measurements", 0, "rows"), None, r"measurements\[0\]\.rows: got None, expected a list"),
    (("measurements", 0, "rows", 0), 5, r"measurements\[0\]\.rows\[0\]: got 5, expected an object"),
    (
        ("measurements", 2, "rows", 0, "time_us"),
        -1,
        r"measurements\[2\]\.rows\[0\]: time_us of triton:mm_3: got -1 with status ok",
    ),
    (
        ("measurements", 2, "rows", 0, "time_us"),
        math.inf,
        r"measurements\[2\]\.rows\[0\]: time_us of .*: got inf with status ok",
    ),
    (
        ("measurements", 2, "rows", 0, "status"),
        "great",
        r"measurements\[2\]\.rows\[0\]: status: got 'great', expected one of ok",
    ),
    (("measurements", 2, "rows", 0, "finalist"), 1, r"measurements\[2\]\.rows\[0\]: finalist: got 1, expected true or false"),
    (
        ("measurements", 2, "rows", 0, "colour"),
        1,
        r"measurements\[2\]\.rows\[0\]: got fields .* unknown: colour; expected content",
    ),
    (
        ("measurements", 2, "rows", 0, "measured_at"),
        "now",
        r"measurements\[2\]\.rows\[0\]: measured_at: got 'now', expected a time",
    ),
    (("limits", 0, "value"), 0, r"limits\[0\]: limit bandwidth_gbps: got 0, expected a finite number above 0"),
    (("ranged",), {}, r"ranged: got \{\}, expected a list"),
    (("ranged", 0), 5, r"ranged\[0\]: got 5, expected an object"),
    (("ranged", 0, "fingerprint"), "{ }", r"ranged\[0\]\.fingerprint: got '\{ \}', expected the canonical JSON text"),
    (("ranged", 0, "value"), 3, r"ranged\[0\]: asked: got 3, expected a mapping of names to plain values"),
    (("ranged", 0, "colour"), 1, r"ranged\[0\]: got fields colour, fingerprint, .*, expected key, fingerprint, kind"),
    (("limits", 0, "measured_at"), "now", r"limits\[0\]: measured_at: got 'now', expected a time in UTC"),
    (("limits", 0, "name"), [], r"limits\[0\]: name: got \[\], expected a text"),
]


@pytest.mark.parametrize(
    ("place", "value", "message"), WRONG_ENTRIES, ids=[f"{'.'.join(map(str, place))}={value}" for place, value, _ in WRONG_ENTRIES]
)
def test_a_wrong_entry_is_named_and_nothing_is_taken_in(
    exported: Path, two: Store, place: tuple[Any, ...], value: object, message: str
) -> None:
    edited(exported, *place, value=value)
    with pytest.raises(StoreError, match=rf"export\.json: {message}"):
        two.import_file(exported)
    assert two.every_row() == []


@pytest.mark.parametrize("text", ["", "not JSON", "[" * 100_000, "\x00\x01"])
def test_a_file_that_is_not_json(tmp_path: Path, two: Store, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(StoreError, match=r"bad\.json: got text that is not JSON .*, expected a file written by gemmtune export"):
        two.import_file(tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["3", "null", "[]"])
def test_json_of_another_kind(tmp_path: Path, two: Store, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(StoreError, match=r"bad\.json: got .*, expected an object with format, version, measurements, limits"):
        two.import_file(tmp_path / "bad.json")


def test_files_that_cannot_be_opened(tmp_path: Path, one: Store) -> None:
    with pytest.raises(
        StoreError, match=r"import: got .*No such file.*nowhere\.json.* expected a readable file written by gemmtune"
    ):
        one.import_file(tmp_path / "nowhere.json")
    with pytest.raises(StoreError, match=r"export: got .*, expected a writable file; choose another path than .*x\.json"):
        one.export_file(tmp_path / "no-folder" / "x.json")
