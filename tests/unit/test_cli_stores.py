"""``gemmtune show``, ``export``, ``import``, ``merge``, ``diff`` and ``store``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import threading

import pytest
import torch
from many_problems import problems
from tuning_results import outcome, problem_result

from gemmtune import Problem, cli, settings
from gemmtune.backends.around import BY_INDEX
from gemmtune.choice import Status
from gemmtune.device import detect
from gemmtune.dispatch.absent import older_kernels
from gemmtune.problem.rows import row_classes
from gemmtune.problem.trace import trace
from gemmtune.selector.offers import offers_for
from gemmtune.selector.result import HOST_US
from gemmtune.selector.segments import Segment, Table
from gemmtune.store.database import Database
from gemmtune.store.key import canonical, fingerprint_text, now
from gemmtune.store.store import Ranged, Row, Store

PROBLEM = Problem.mm(16, 4096, 4096, dtype=torch.float32, device_type="cpu")
MACHINE = canonical({"device": "a CPU", "threads": "2"})
OTHER_MACHINE = canonical({"device": "a GPU"})
HERE = fingerprint_text(detect("cpu"), "graph")
OLD = canonical(json.loads(HERE) | {"torch": "1.0"})
"""This machine before an update of torch."""


def row(name, time_us=None, **fields):
    defaults = {
        "key": PROBLEM.key,
        "fingerprint": MACHINE,
        "backend": name.split(":")[0],
        "content_hash": name,
        "status": Status.OK if time_us else Status.CRASHED,
        "finalist": bool(time_us),
        "measured_at": "2020-01-02T03:04:05.000006+00:00",
    }
    return Row(name=name, time_us=time_us, **(defaults | fields))


ROWS = [
    row("aten:mm", 50.0, baseline=True),
    row("cpp:fast", 20.0),
    row("cpp:slow", 30.0),
    row("cpp:slower", 31.0),
    row("cpp:bad", reason="SIGSEGV"),
    row("aten:mm", 5.0, baseline=True, fingerprint=OTHER_MACHINE),
]


@pytest.fixture
def filled(own_store):
    """A store with one problem on two machines."""
    store = Store.open(own_store)
    store.put(ROWS)
    store.close()
    return own_store


def test_show_marks_times_and_ratios_of_a_busy_machine(capsys, own_store):
    why = {"disturbed": "other processes used 80% of the cores"}
    store = Store.open(own_store)
    store.put([row("aten:mm", 50.0, baseline=True), row("cpp:fast", 20.0, info=why), row("cpp:slow", 30.0, finalist=False)])
    store.close()
    assert cli.run(["show", "--json", "-"]) == 0
    assert [known["disturbed"] for known in json.loads(capsys.readouterr().out)] == [why["disturbed"]]
    assert cli.run(["show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-8:] for line in lines if line.endswith("on a busy machine")] == [
        ["2.50", "3", "0", "2020-01-02", "03:04", "on", "a", "busy", "machine"][-8:]
    ]
    assert any(line.split() == ["cpp:slow", "~30.0"] for line in lines)


def test_show_has_the_best_rows_of_each_problem_and_machine(capsys, filled):
    assert cli.run(["show"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    text = ["mm", "16x4096x4096", "float32", "nt", "on", "cpu"]
    assert lines[0] == ["store:", str(filled)]
    assert ["device=a", "CPU,", "threads=2"] in lines
    assert [*text, "cpp:fast", "20.0", "2.50", "4", "1", "2020-01-02", "03:04"] in lines
    assert ["cpp:slow", "30.0"] in lines
    assert ["cpp:slower", "31.0"] in lines
    assert ["aten:mm", "50.0"] not in lines
    assert ["device=a", "GPU"] in lines
    assert [*text, "aten:mm", "5.0", "1.00", "1", "0", "2020-01-02", "03:04"] in lines


def test_show_counts_torch_without_the_look_up_and_cuts_long_epilogues(capsys, own_store):
    curve = trace(lambda x: (x * 2 + 1).relu().sigmoid() * (x * 3 + 2).tanh().sigmoid() + (x * 5 + 4).sigmoid(), torch.float32, ())
    long = dataclasses.replace(Problem.mm(16, 32, 64, device_type="cpu"), epilogue=curve)
    Store.open(own_store).put([row("aten:mm", 50.0, key=long.key, baseline=True, info={HOST_US: 10.0})])
    assert cli.run(["show"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "aten:mm" in line)
    assert line.startswith("mm 16x32x64 ")
    assert " … " in line
    assert len(line) < 200
    assert line.split("aten:mm")[1].split()[:2] == ["50.0", "0.80"]


OTHER = Problem.bmm(2, 8, 16, 32, dtype=torch.float16, device_type="cpu")
TABLE = Ranged(key=row_classes(PROBLEM)[0].key, fingerprint=MACHINE, kind="table", value={"seed": 0, "segments": []})


@pytest.fixture
def varied(filled):
    """The filled store with another problem, a table, and a limit."""
    store = Store.open(filled)
    store.put([row("aten:bmm", 7.0, key=OTHER.key, baseline=True), row("aten:mm", 9.0, fingerprint=HERE, baseline=True)])
    store.put_ranged(TABLE)
    store.put_limits(OLD, {"bandwidth_gbps": 10.0})
    store.put([row("aten:mm", 8.0, fingerprint=OLD, baseline=True)])
    store.close()
    return filled


@pytest.mark.parametrize(
    ("conditions", "shown", "tables"),
    [
        ([], [PROBLEM] * 4 + [OTHER], 1),
        (["16x4096x4096"], [PROBLEM] * 4, 1),
        (["2x8x16x32"], [OTHER], 0),
        (["8x16x32"], [], 0),
        (["8x4096x4096"], [], 1),
        (["--match", "^bmm .*float16"], [OTHER], 0),
        (["--here"], [PROBLEM], 0),
    ],
)
def test_show_selects_by_shape_text_and_machine(capsys, varied, conditions, shown, tables):
    assert cli.run(["show", *conditions, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sorted(x["problem"]["text"] for x in data if "problem" in x) == sorted(map(str, shown))
    assert sum("kind" in x for x in data) == tables
    assert cli.run(["show", *conditions]) == 0
    assert ("no problem of the store meets the conditions" in capsys.readouterr().out) == (not shown and not tables)


def test_prune_removes_tables_that_this_version_cannot_read(capsys, varied):
    old = dataclasses.replace(TABLE, kind="segments", value={"version": 2, "seed": 0, "segments": []})
    Store.open(varied).put_ranged(old)
    assert cli.run(["store", "prune"]) == 0
    assert "1 table and" in capsys.readouterr().out
    assert [x.kind for x in Store.open(varied).every_ranged()] == [TABLE.kind]


def test_prune_removes_older_kernels_of_this_machine(capsys, own_store):
    """Settings leave nothing out. A kernel of another machine or of a library may be one that this process does not list."""
    problem, (rows_class,) = Problem.mm(8, 32, 32, dtype=torch.float32, device_type="cpu"), row_classes(PROBLEM)
    known = offers_for(problem, detect("cpu"), settings.Settings(backends=("cpp",), search="exhaustive")).choices[-1]
    hashes = {"now": known.content_hash, "older": "0123"}
    names = {"now": known.name, "older": known.name, "library": "cublaslt:x", "elsewhere": known.name}
    rows = [
        row(names[x], 1.0, key=problem.key, fingerprint=MACHINE if x == "elsewhere" else HERE, content_hash=hashes.get(x, x))
        for x in names
    ]
    found = (choice for choice in offers_for(PROBLEM, detect("cpu"), settings.Settings(backends=("cpp",))).choices)
    table = Table(segments=(Segment.of(next(found), 1, 16, 16),), seed=0)
    older = {"segments": [table.to_json()["segments"][0] | {"content_hash": "0123"}]}
    facts = [
        Ranged(key=rows_class.key, fingerprint=HERE, kind=kind, value=table.to_json() | more)
        for kind, more in (("segments", {}), ("default", older))
    ]
    with contextlib.closing(Store.open(own_store)) as store:
        store.put(rows)
        for fact in facts:
            store.put_ranged(fact)
    with settings.patch(choice_denylist_regex="cpp"):
        assert cli.run(["store", "prune"]) == 0
    assert "1 row of 1 problem, 1 table and 0 limits removed" in capsys.readouterr().out
    assert {x.content_hash for x in Store.open(own_store).every_row()} == {known.content_hash, "library", "elsewhere"}
    assert [x.kind for x in Store.open(own_store).every_ranged()] == ["segments"]


def test_older_kernels_are_those_that_no_offer_has_and_known_names_need_no_list(monkeypatch):
    device, wanted = detect("cpu"), settings.Settings(backends=("cpp",), search="exhaustive", deterministic=False)
    listed, found = [], 0
    monkeypatch.setattr(
        "gemmtune.dispatch.absent.legal_offers", lambda x, *_, **__: listed.append(x) or offers_for(x, device, wanted)
    )
    varied = (x for _, x in problems("cpu", 1) if x.op not in BY_INDEX)
    for problem in itertools.islice(varied, 0, None, 29):
        choices = offers_for(problem, device, wanted).choices[::9]
        rows = [row(x.name, content_hash=x.content_hash if i % 3 else f"older{i}") for i, x in enumerate(choices)]
        found += len(rows)
        assert older_kernels(rows, problem, device, settings.current()) == {f"older{i}" for i in range(0, len(rows), 3)}
    assert found > 50
    assert not listed
    known = offers_for(PROBLEM, device, wanted).choices[-1].content_hash
    renamed = [row("cpp:then", content_hash=x) for x in ("0123", known)]
    assert older_kernels(renamed, PROBLEM, device, settings.current()) == {"0123"}
    assert listed == [PROBLEM]


def test_prune_lets_others_write_and_keeps_what_they_measured(monkeypatch, varied):
    """The older kernels of a large store take minutes to find."""
    old = dataclasses.replace(ROWS[0], fingerprint=OLD)
    kept = dataclasses.replace(old, time_us=1.0, measured_at=now())
    outdated = dataclasses.replace(old, content_hash="other")

    def meanwhile(rows, *_):
        with contextlib.closing(Store.open(varied, busy_timeout_s=0.1)) as store:
            store.put([kept])
        return set()

    Store.open(varied).put([old, outdated, dataclasses.replace(old, fingerprint=HERE)])
    monkeypatch.setattr("gemmtune.cli.stores.older_kernels", meanwhile)
    assert cli.run(["store", "prune"]) == 0
    assert [x for x in Store.open(varied).every_row() if x.fingerprint == OLD] == [kept]


@pytest.mark.parametrize(
    ("command", "left", "tables", "limits"),
    [
        (["forget", "16x4096x4096"], {"aten:bmm"}, 0, 1),
        (["forget", "--match", "^bmm"], {"aten:mm", "cpp:fast", "cpp:slow", "cpp:slower", "cpp:bad"}, 1, 1),
        (["forget", "--all"], set(), 0, 0),
        (["forget", "--all", "--dry-run"], {row.name for row in ROWS} | {"aten:bmm"}, 1, 1),
        (["prune"], {row.name for row in ROWS} | {"aten:bmm"}, 1, 0),
        (["prune", "--older", "0"], set(), 0, 0),
    ],
)
def test_rows_tables_and_limits_are_removed(capsys, varied, command, left, tables, limits):
    before = [dataclasses.replace(r, measured_at="2020-01-01T00:00:00.000000+00:00") for r in Store.open(varied).every_row()]
    Store.open(varied).put(before)
    assert cli.run(["store", *command]) == 0
    out = capsys.readouterr().out
    assert ("would be removed from" in out) == ("--dry-run" in command)
    store = Store.open(varied)
    assert {r.name for r in store.every_row()} == left
    assert len(store.every_ranged()) == tables
    assert len(store.limits(OLD)) == limits
    assert any(r.fingerprint == OLD for r in store.every_row()) == (command[0] == "forget" and bool(left) and left != {"aten:bmm"})
    assert set(store.keys(MACHINE)) == {r.key for r in store.every_row() if r.fingerprint == MACHINE}


def test_forget_needs_a_condition_or_all(capsys, filled):
    for words in (["forget"], ["forget", "--all", "16x4096x4096"]):
        assert cli.run(["store", *words]) == 2
        assert "expected SHAPE, --match or --here, or else --all alone" in capsys.readouterr().err
    assert cli.run(["show", "--match", "("]) == 2
    assert "--match: got '(', expected a regular expression" in capsys.readouterr().err


def test_the_path_of_the_store(capsys, own_store):
    assert cli.run(["store", "path"]) == 0
    assert capsys.readouterr().out == f"{own_store}\n"


def test_export_of_some_problems(filled, tmp_path, capsys):
    Store.open(filled).put([row("cpp:here", 3.0, fingerprint=HERE), row("aten:bmm", 7.0, key=OTHER.key)])
    Store.open(filled).put_limits(MACHINE, {"bandwidth_gbps": 9.0})
    file = tmp_path / "some.json"
    for asked, rows in (([], 8), (["16x4096x4096"], 7), (["--match", "^bmm"], 1), (["--here"], 1)):
        assert cli.run(["export", str(file), *asked]) == 0
        assert f"{rows} row{'s' * (rows > 1)} of" in capsys.readouterr().out
        data = json.loads(file.read_text())
        assert sum(len(group["rows"]) for group in data["measurements"]) == rows
        assert len(data["limits"]) == (asked != ["--here"]), "the limits of a machine go with its problems"


def test_diff_of_a_store_an_export_and_a_result(capsys, filled, tmp_path):
    export, later, result = tmp_path / "a.json", tmp_path / "later.sqlite", tmp_path / "result.json"
    assert cli.run(["export", str(export)]) == 0
    newer = canonical(json.loads(MACHINE) | {"torch": "9"})
    Store.open(later).put([row("cpp:slow", 25.0, fingerprint=newer), row("aten:bmm", 7.0, key=OTHER.key)])
    found = problem_result(outcome("cpp:fast", 10.0), problem=PROBLEM)
    result.write_text(json.dumps([found.to_json(), {"table": {}}]))
    capsys.readouterr()
    assert cli.run(["diff", str(export), str(later)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [*str(PROBLEM).split(), "cpp:slow", "20.0", "25.0", "1.25", "cpp:fast"] in lines
    assert ["only", "before:", *str(PROBLEM).split()] in lines  # on the other machine
    assert ["only", "after:", *str(OTHER).split()] in lines
    assert lines[-1][:6] == ["1", "problem", "on", "both", "sides:", "1"]
    assert cli.run(["diff", str(later), str(result), "--json", "-"]) == 0
    one, other = json.loads(capsys.readouterr().out)
    pair = next(x for x in (one, other) if x["ratio"])
    after = {"pick": "cpp:fast", "time_us": 10.0, "disturbed": ""}
    assert (pair["before"]["pick"], pair["after"], pair["ratio"]) == ("cpp:slow", after, 0.4)
    assert cli.run(["diff", str(export), str(export)]) == 0
    assert capsys.readouterr().out == "2 problems on both sides: 0 slower, 0 faster by over 2%\n"
    busy = problem_result(dataclasses.replace(outcome("cpp:fast", 12.0), info={"disturbed": "other work"}), problem=PROBLEM)
    (tmp_path / "busy.json").write_text(json.dumps([busy.to_json()]))
    assert cli.run(["diff", str(result), str(tmp_path / "busy.json"), "--all"]) == 0
    out = capsys.readouterr().out
    assert "1.2 (on a busy machine)" in " ".join(out.split())
    assert "0 slower, 0 faster by over 2%, or 25% on a busy machine" in out


@pytest.mark.parametrize("text", ["{", "[1]", "{}", "SQLite format 3 or not"])
def test_diff_of_other_files_is_an_error(capsys, tmp_path, text):
    (tmp_path / "x").write_text(text)
    assert cli.run(["diff", str(tmp_path / "x"), str(tmp_path / "x")]) == 1
    assert str(tmp_path / "x") in capsys.readouterr().err


def test_show_json_has_every_row(capsys, filled):
    assert cli.run(["show", "--json", "-"]) == 0
    here, there = json.loads(capsys.readouterr().out)
    assert here["problem"]["text"] == str(PROBLEM)
    assert (here["problem"]["m"], here["machine"]["threads"]) == (16, "2")
    assert (here["pick"], here["speedup_over_torch"]) == ("cpp:fast", 2.5)
    assert {c["name"]: c["status"] for c in here["choices"]}["cpp:bad"] == "crashed"
    assert (there["machine"], len(there["choices"])) == ({"device": "a GPU"}, 1)


@pytest.mark.parametrize(
    ("command", "times"),
    [
        ("show", 1),
        ("show --match mm", 1),
        ("export out.json", 1),
        ("export out.json --match mm", 2),
        ("doctor", 1),
        ("import -", 1),
    ],
)
def test_a_store_is_read_no_more_often_than_needed(filled, tmp_path, monkeypatch, command, times):
    """A store of 100000 rows takes seconds to read."""
    read, every_row = [], Database.every_row
    monkeypatch.setattr(Database, "every_row", lambda self: read.append(self.path) or every_row(self))
    monkeypatch.chdir(tmp_path)
    cli.run(command.split())
    assert read.count(filled) == times


def test_show_of_failures_only(capsys, own_store):
    Store.open(own_store).put([row("cpp:bad", reason="SIGSEGV")])
    assert cli.run(["show"]) == 0
    assert "none" in capsys.readouterr().out


def test_show_of_an_empty_store_says_how_to_fill_it(capsys, own_store):
    assert cli.run(["show"]) == 0
    assert capsys.readouterr().out == f"store: {own_store}\nempty; gemmtune tune fills it\n"


def test_export_and_import_into_another_store(capsys, filled, tmp_path):
    file, second = tmp_path / "rows.json", tmp_path / "second.sqlite"
    assert cli.run(["export", str(file)]) == 0
    assert capsys.readouterr().out == f"6 rows of {filled} written to {file}\n"
    with settings.patch(store_path=str(second)):
        assert cli.run(["import", str(file)]) == 0
        assert capsys.readouterr().out == (
            f"6 rows of {file}: 6 new, 0 newer than ours, 0 not newer than ours and ignored; store: {second}\n"
        )
        assert cli.run(["import", str(file), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "added": 0, "replaced": 0, "kept": 6, "store": str(second), "source": str(file),
    }  # fmt: skip
    assert {r.name for r in Store.open(second).every_row()} == {r.name for r in ROWS}


def test_merge_keeps_the_later_measurement(capsys, filled, tmp_path):
    other = tmp_path / "other.sqlite"
    later = dataclasses.replace(ROWS[1], time_us=19.0, measured_at="2021-01-01T00:00:00.000000+00:00")
    earlier = dataclasses.replace(ROWS[2], time_us=1.0, measured_at="2019-01-01T00:00:00.000000+00:00")
    Store.open(other).put([later, earlier, row("cpp:new", 40.0)])
    assert cli.run(["merge", str(other)]) == 0
    assert "3 rows of" in (out := capsys.readouterr().out)
    assert "1 new, 1 newer than ours, 1 not newer than ours and ignored" in out
    times = {r.name: r.time_us for r in Store.open(filled).every_row() if r.fingerprint == MACHINE}
    assert (times["cpp:fast"], times["cpp:slow"], times["cpp:new"]) == (19.0, 30.0, 40.0)


def test_import_of_something_else_is_an_error_and_changes_nothing(capsys, filled, tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"format": "other"}')
    assert cli.run(["import", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file}: got an object with format, expected one with format, version")
    assert len(Store.open(filled).every_row()) == len(ROWS)


def test_an_export_goes_to_standard_output_and_a_pipe_is_imported(capsys, filled, tmp_path):
    for file_format in ("t4", "inductor"):
        assert cli.run(["export", "-", "--format", file_format]) == 0
        out, err = capsys.readouterr()
        json.loads(out)
        assert "written to -" in err
    assert cli.run(["export", "-", "16x4096x4096"]) == 0
    text = capsys.readouterr().out
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()
    with settings.patch(store_path=str(tmp_path / "new.sqlite")):
        assert cli.run(["import", str(pipe)]) == 0
    assert capsys.readouterr().out.startswith(f"{len(ROWS)} rows of {pipe}: {len(ROWS)} new")


def test_conditions_that_nothing_meets_leave_the_exported_file(capsys, filled, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    assert cli.run(["export", str(kept), "3x3x3"]) == 1
    assert "no problem of the store meets the conditions" in capsys.readouterr().err
    assert kept.read_text() == "before"


@pytest.mark.parametrize("command", ["import", "merge"])
def test_both_commands_take_a_store_and_an_export(capsys, filled, tmp_path, command):
    export, store, empty = tmp_path / "x.json", tmp_path / "x.sqlite", tmp_path / "empty"
    Store.open(store).put(ROWS)
    assert cli.run(["export", str(export)]) == 0
    empty.write_text("")
    for file, status, expected in (
        (store, 0, f"{len(ROWS)} not newer than ours"),
        (export, 0, f"{len(ROWS)} not newer than ours"),
        (empty, 1, "expected a file written by gemmtune export"),
        (tmp_path, 1, "Is a directory"),
    ):
        assert cli.run([command, str(file)]) == status
        said = capsys.readouterr()
        assert expected in said.out + said.err


@pytest.mark.parametrize("command", [["show"], ["export", "x.json"], ["import", "x.json"], ["merge", "x.sqlite"]])
def test_commands_about_the_store_fail_where_there_can_be_none(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with settings.patch(store_path=str(tmp_path / "file" / "store.sqlite")):
        assert cli.run(command) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: store: got ")
    assert err.count("GEMMTUNE_STORE_PATH") == 1


def test_a_corrupt_store_is_put_aside_with_a_warning(capsys, own_store):
    own_store.write_bytes(b"no database" * 1000)
    assert cli.run(["show"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"warning: store: got a corrupt file at {own_store} ")
    assert printed.out.endswith("empty; gemmtune tune fills it\n")
