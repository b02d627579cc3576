"""Data that others wrote: every reader answers within bounds, with its own error, and no code reaches the terminal."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click import ClickException
from rich.text import Text
from store_cases import KEYS, MACHINES, row

from gemmtune import foreign, settings
from gemmtune.cli import printing
from gemmtune.cli.output import note, write_json
from gemmtune.cli.shapes import parse_shape, problems_of_file, range_of_word
from gemmtune.cli.spec import Spec
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.options import _plain
from gemmtune.conformance.runs.files import cases_to_repeat
from gemmtune.declaration.traits import Traits
from gemmtune.device import detect
from gemmtune.errors import GemmtuneError, InvalidProblemError, SettingsError, StoreError
from gemmtune.integration.quantize import check_kind, names_of
from gemmtune.integration.recording import Recording
from gemmtune.perf_gate.baselines import Baselines, slug
from gemmtune.problem import Problem, trace
from gemmtune.selector.result import HOST_US, PLACE, Outcome
from gemmtune.selector.segments import TABLE, VERSION, Table
from gemmtune.store.row import Limit, Ranged, Row
from gemmtune.store.store import Store

DIGITS = "1" + "0" * 400
HOSTILE = {
    "nothing": "",
    "text": "hello",
    "zeros": "\0\0",
    "no UTF-8": b"\xff\xfe{",
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "some levels too many": "[" * 60 + "]" * 60,
    "a number of 401 digits": f'{{"format": {DIGITS}}}',
    "a number of 10,000 digits": f"[{'9' * 10_000}]",
    "a float beyond floats": '{"shapes": [1e999]}',
    "a value": "3",
    "a list": "[]",
    "an object": "{}",
    "a list of lists": "[[[]]]",
}


def test_values_within_bounds_are_read():
    text = '{"a": [1, -9223372036854775807, 1.5, true, null, "x"], "b": Infinity}'
    assert foreign.parse_json(text) == json.loads(text)
    assert foreign.parse_json("[" * 50 + "]" * 50) == json.loads("[" * 50 + "]" * 50)


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.startswith(("a value", "a list", "an object"))])
def test_values_out_of_bounds_are_errors(name: str, tmp_path: Path):
    data = HOSTILE[name]
    path = tmp_path / "x.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        foreign.read_json(path)
    assert len(str(caught.value)) < 300


def test_large_files_are_not_read(tmp_path: Path):
    (tmp_path / "x.json").write_text("[1, 2, 3]")
    assert foreign.read_json(tmp_path / "x.json", most_bytes=9) == [1, 2, 3]
    with pytest.raises(ValueError, match="got 9 bytes, expected at most 8"):
        foreign.read_json(tmp_path / "x.json", most_bytes=8)


def baselines_of(path: Path) -> object:
    device = detect("cpu")
    path.rename(path.with_name(f"{slug(device)}.json"))
    return Baselines.of(str(path.parent), device)


READERS: dict[str, Callable[[Path], object]] = {
    "import": lambda path: Store.open(path.with_suffix(".sqlite")).import_file(path),
    "--recorded": Recording.read,
    "--shapes": lambda path: problems_of_file(str(path), Spec()),
    "baselines": baselines_of,
    "--repro": lambda path: cases_to_repeat([f"@{path}"]),
    "traits": lambda path: Traits().changed(Traits.from_file(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_has_a_clear_error(reader: str, tmp_path: Path):
    for number, (name, data) in enumerate(HOSTILE.items()):
        if reader in ("--repro", "traits") and name == "nothing":
            continue  # no cases and no traits
        path = tmp_path / str(number) / "file.json"
        path.parent.mkdir()
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        with pytest.raises((GemmtuneError, ClickException)) as caught:
            READERS[reader](path)
        text = str(caught.value)
        assert reader in ("--repro", "traits") or path.name in text or "cpu-" in text, (name, text)
        assert foreign.visible(text) == text, name
        assert len(text) < 1000, name


def test_names_with_thousands_of_digits_are_errors():
    many = "9" * 5000
    for wrong in (f"{many}x1x1", f"1x{many}x1"):
        with pytest.raises(InvalidProblemError):
            parse_shape(wrong)
    for case in (f"bound:mm-f32-{many}x1x1", f"bound:mm-f32-1x1x1-seed.{many}", f"bound:mm-f32-1x1x1-a.col+{many}"):
        with pytest.raises(GemmtuneError):
            Case.parse(case)
    with pytest.raises(ClickException):
        range_of_word(f"1..{many}x1x1", Spec())
    assert _plain("[" * 5000) == "[" * 5000
    assert _plain(many) == many


CODES = "\x1b[2J\x07\x9b31m\u202e\u200b\x7f"


def test_codes_become_escapes():
    assert foreign.visible(f"a{CODES}ü µ\tb\nc") == "a\\x1b[2J\\x07\\x9b31m\\u202e\\u200b\\x7fü µ\tb\nc"
    assert json.loads(foreign.visible(json.dumps(CODES, ensure_ascii=False), as_json=True)) == CODES
    assert foreign.shown(10**5000) == "a value of type int that is too long to show"
    assert foreign.shown([CODES] * 100).startswith(r"['\x1b[2J\x07")
    assert len(foreign.shown("x" * 1000)) == foreign.SHOWN_CHARS


@pytest.mark.parametrize("terminal", [False, True])
def test_no_code_of_a_text_reaches_the_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    printing.show([Text(f"name {CODES}", style="bold"), f"plain {CODES}"])
    note(f"error: {CODES}")
    write_json("-", {"name": CODES})
    out, err = capsys.readouterr()
    for code in ("\x1b[2J", "\x07", "\x9b", "\u202e", "\u200b", "\x7f"):
        assert code not in out + err
    assert r"\x1b[2J" in out
    assert r"\x1b[2J" in err


def exported(tmp_path: Path) -> tuple[Store, Path, dict[str, Any]]:
    store = Store.open(tmp_path / "mine.sqlite")
    other = Store.open(tmp_path / "other.sqlite")
    other.put([row(0)])
    other.put_limits(MACHINES[0], {"bandwidth_gbps": 12.0})
    other.put_ranged(Ranged(key=KEYS[0], fingerprint=MACHINES[0], kind="asked", value={"rows": [3]}))
    other.export_file(tmp_path / "export.json")
    return store, tmp_path / "export.json", json.loads((tmp_path / "export.json").read_text())


ROW, LIMIT, FACT = ("measurements", 0, "rows", 0), ("limits", 0), ("ranged", 0)
FUTURE = "2099-01-01T00:00:00.000000+00:00"
IMPOSSIBLE: list[tuple[tuple[Any, ...], object, str]] = [
    ((*ROW, "time_us"), 1e-9, r"time_us of triton:mm_0 of .*: got 1e-09, expected 0.01 to 1e\+12: no machine takes less"),
    ((*ROW, "time_us"), 1e300, r"time_us of triton:mm_0 of .*: got 1e\+300, expected"),
    ((*ROW, "measured_at"), FUTURE, r"measured_at of triton:mm_0 of .*: got 2099-.*, expected a time before .*: set the clock"),
    ((*ROW, "name"), f"aten{CODES}", r"rows\[0\]: name: got 'aten\\x1b\[2J.*', expected a text .*, without control codes"),
    ((*ROW, "backend"), "a\rb", r"rows\[0\]: backend: got 'a\\rb'"),
    ((*ROW, "content_hash"), "\x1b", r"rows\[0\]: content_hash: got '\\x1b'"),
    ((*LIMIT, "value"), 1e-300, r"limit bandwidth_gbps: got 1e-300, expected 1e-06 to 1e\+09"),
    ((*LIMIT, "value"), 1e30, r"limit bandwidth_gbps: got 1e\+30"),
    ((*LIMIT, "measured_at"), FUTURE, r"measured_at of limit bandwidth_gbps: got 2099"),
    ((*LIMIT, "name"), CODES, r"limits\[0\]: name: got"),
    ((*FACT, "measured_at"), FUTURE, r"measured_at of asked of .*: got 2099"),
    ((*FACT, "kind"), CODES, r"ranged\[0\]: kind: got"),
]  # fmt: skip
BARELY_POSSIBLE: list[tuple[tuple[Any, ...], float]] = [
    ((*ROW, "time_us"), 0.01), ((*ROW, "time_us"), 1e12), ((*LIMIT, "value"), 1e-6), ((*LIMIT, "value"), 1e9),
]  # fmt: skip


def changed(data: dict[str, Any], place: Sequence[Any], value: object) -> str:
    """Return the text of an export with another value at ``place``."""
    copy = json.loads(json.dumps(data))
    functools.reduce(operator.getitem, place[:-1], copy)[place[-1]] = value
    return json.dumps(copy)


def test_what_no_machine_measured_is_not_imported(tmp_path: Path):
    store, path, data = exported(tmp_path)
    for place, value, message in IMPOSSIBLE:
        path.write_text(changed(data, place, value))
        with pytest.raises(StoreError, match=message) as caught:
            store.import_file(path)
        assert foreign.visible(str(caught.value)) == str(caught.value)
        assert store.every_row() == []
    path.write_text(json.dumps(data).replace('"time_us": 10.0', f'"time_us": {DIGITS}'))
    with pytest.raises(StoreError, match=r"got the number 10000.*, expected at most 64 bits"):
        store.import_file(path)
    for place, value in BARELY_POSSIBLE:
        path.write_text(changed(data, place, value))
        store.import_file(path)
    assert len(store.every_row()) == 1


def test_a_faster_product_than_any_machine_has_is_refused(tmp_path: Path):
    large = Problem.mm(65536, 65536, 65536, dtype=torch.float16, device_type="cpu").key
    other, store = Store.open(tmp_path / "other.sqlite"), Store.open(tmp_path / "mine.sqlite")
    other.put([row(0, key=large, time_us=100.0)])
    with pytest.raises(StoreError, match=r"got 100, expected 562\.95 to"):
        store.merge(tmp_path / "other.sqlite")


def test_a_date_in_the_future_wins_no_merge_any_more(tmp_path: Path):
    """A store may have such a row from before, or from a clock that was wrong."""
    store, path, _ = exported(tmp_path)
    store.put([row(0, measured_at=FUTURE, time_us=1.0)])
    store._write([], [Limit(fingerprint=MACHINES[0], name="bandwidth_gbps", value=1.0, measured_at=FUTURE)])
    store.put_ranged(Ranged(key=KEYS[0], fingerprint=MACHINES[0], kind="asked", value={}, measured_at=FUTURE))
    assert store.import_file(path).replaced == 1
    assert [x.time_us for x in store.every_row()] == [10.0]
    assert store.limits(MACHINES[0]) == {"bandwidth_gbps": 12.0}
    assert [x.value for x in store.every_ranged()] == [{"rows": [3]}]
    store.put([row(1, measured_at=FUTURE)])
    with pytest.raises(StoreError, match="measured_at of triton:mm_1"):
        Store.open(tmp_path / "third.sqlite").merge(tmp_path / "mine.sqlite")


def test_records_of_a_foreign_database_that_break_the_rules_are_left_out():
    texts = row(0).record
    info = texts.index('{"stages":4,"tile":[64,128,32],"warps":8}')
    for value in ("[" * 5000, f'{{"a":{DIGITS}}}', "hello", None, b"\xff", "[]"):
        record = (*texts[:info], value, *texts[info + 1 :])
        assert Row.of_record(KEYS[0], MACHINES[0], *record) is None
        assert Ranged.of_record(KEYS[0], MACHINES[0], "kind", value, texts[-1]) is None
    assert Limit.of_record(MACHINES[0], CODES, 1.0, texts[-1]) is None
    assert Limit.of_record(MACHINES[0], "a", "1.0", texts[-1]) is None


def test_reasons_and_infos_hold_no_codes():
    made = row(0, reason=f"ld: {CODES}\nfailed", info={"disturbed": CODES, CODES: [CODES], "big": 10**400})
    assert made.reason == foreign.visible(f"ld: {CODES}\nfailed")
    assert made.info == {"disturbed": foreign.visible(CODES), foreign.visible(CODES): [foreign.visible(CODES)], "big": str(10**400)}


def test_figures_of_a_foreign_row_do_not_stop_a_tuning():
    base = {"name": "a", "backend": "aten", "content_hash": "a", "status": "ok", "time_us": 5.0}
    for value in ("x", None, [], {}, math.inf, math.nan, -1.0):
        found = Outcome(**base, info={HOST_US: value, PLACE: value})  # type: ignore[arg-type]
        assert (found.host_us, found.place, found.direct_us) == (0.0, math.inf, 5.0)


SEGMENT = {"lo": 1, "hi": 8, "name": "a", "backend": "b", "content_hash": "c", "anchor": 8, "checked": [1], "kernels": [1]}


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"content_hash": None},
        {"anchor": "8"},
        {"anchor": 0},
        {"checked": ["x"]},
        {"kernels": 1},
        {"time_us": "1"},
        {"lo": 0.5},
    ],
    ids=str,
)
def test_a_table_of_other_types_is_an_error(change: dict[str, Any]):
    value = {"version": VERSION, "seed": 0, "segments": [SEGMENT]}
    fact = Ranged(key="k", fingerprint="f", kind=TABLE, value=value)
    assert Table.of(fact).hi == 8
    value["segments"] = [SEGMENT | change]
    with pytest.raises((StoreError, InvalidProblemError)):
        Table.of(Ranged(key="k", fingerprint="f", kind=TABLE, value=value))


FUSED = Problem.mm(16, 64, 32, dtype=torch.float32, device_type="cpu")
EPILOGUE = trace.trace(lambda acc, x: torch.maximum(acc * 2 + x, acc), torch.float32, [torch.empty(64)])


def edit(data: Any, place: tuple[Any, ...], value: object) -> None:
    for step in place[:-1]:
        data = data[step]
    data[place[-1]] = value


PROBLEM_EDITS: list[tuple[tuple[Any, ...], object]] = [
    (("a", "size"), [16.0, 32]), (("a", "size"), ["16", 32]), (("a", "stride"), [True, 1]), (("a", "offset"), 10**30),
    (("a", "dtype"), "__class__"), (("a", "dtype"), 3), (("a", "dtype"), "complex64"), (("alpha",), "2.0"), (("beta",), 0),
    (("prepacked",), "yes"), (("precision", "input_mode"), "fast);"), (("precision", "reduced_partials"), "x"),
    (("op",), ["mm"]), (("device_type",), "tpu"),
    (("epilogue", "nodes", 1, "op"), "system"), (("epilogue", "nodes", 1, "args"), ["%0", 'x); system("true");']),
    (("epilogue", "nodes", 1, "args"), ["%0", "%7"]), (("epilogue", "nodes", 1, "args"), ["%-1", 2]),
    (("epilogue", "nodes", 1, "args"), []), (("epilogue", "nodes", 1, "args"), ["%0"] * 9), (("epilogue", "nodes"), []),
    (("epilogue", "operands"), []), (("epilogue", "operands", 0, "size"), ["64"]),
]  # fmt: skip


def test_a_problem_of_others_has_only_words_that_templates_may_print():
    problem = Problem.from_json(FUSED.to_json() | {"epilogue": json.loads(json.dumps(_plain_epilogue()))})
    assert problem.epilogue == EPILOGUE
    for place, value in PROBLEM_EDITS:
        data = json.loads(problem.key)
        edit(data, place, value)
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            Problem.from_json(data)


def _plain_epilogue() -> Any:
    return dataclasses.replace(FUSED, epilogue=EPILOGUE).to_json()["epilogue"]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "7", None])
def test_a_recording_with_another_count_is_an_error(value: object, tmp_path: Path):
    recording = Recording()
    recording.note(FUSED, 3)
    recording.write(tmp_path / "r.json")
    assert Recording.read(tmp_path / "r.json").counts == recording.counts
    data = json.loads((tmp_path / "r.json").read_text())
    data["problems"][0]["count"] = value
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(
        InvalidProblemError, match=r"problems\[0\]: count: got .*, expected a whole number from 1 on; record it again"
    ):
        Recording.read(tmp_path / "r.json")


@pytest.mark.parametrize("name", ["choice_timeout_s", "compile_timeout_s", "max_profiling_configs"])
def test_settings_are_bounded(name: str):
    for value in (10**400, math.inf, math.nan, 1e300, -1, "x", True):
        with pytest.raises(SettingsError, match=f"{name}: got ") as caught, settings.patch(**{name: value}):
            pass
        assert len(str(caught.value)) < 300


def test_the_quantization_of_a_checkpoint_is_checked():
    for value in (["int4"], {}, None, CODES, 10**400):
        with pytest.raises(InvalidProblemError, match="kind: got "):
            check_kind(value, 128)  # type: ignore[arg-type]
    for group in ("128", 128.0, True, 10**400, [128]):
        with pytest.raises(InvalidProblemError, match="group: got "):
            check_kind("int4", group)  # type: ignore[arg-type]
    for skip in (5, None, [5], [["a"]]):
        with pytest.raises(InvalidProblemError, match="skip: got "):
            names_of(skip)  # type: ignore[arg-type]
