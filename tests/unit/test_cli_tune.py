"""``gemmtune tune``: what it asks of the tuner, and what it prints."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tuning_results import FAST, TORCH, failure, outcome, problem_result

from gemmtune import Problem, cli, settings
from gemmtune.choice import Refusal, Status
from gemmtune.device import detect
from gemmtune.selector.progress import Lines, Progress
from gemmtune.selector.segments import INVARIANT, TABLE, Segment, Table
from gemmtune.selector.table import TuningResult
from gemmtune.store.key import fingerprint_text
from gemmtune.store.store import Ranged, Row, Store


@pytest.fixture
def tuner(monkeypatch):
    """A tuner that keeps what it was asked and answers with made-up results."""

    class Tuner:
        """The stand-in."""

        result = TuningResult((problem_result(FAST, TORCH),))

        tables = ()

        def __call__(self, problems, *, settings, progress, device, again, budget_s=None, m=None):
            if m is not None:
                self.tables += ((problems, m, settings.batch_invariant),)
                return ()
            self.problems, self.settings, self.progress, self.device, self.again = problems, settings, progress, device, again
            self.budget_s = budget_s
            for result in self.result:
                progress.end(result)
            return self.result

    tuner = Tuner()
    monkeypatch.setattr("gemmtune.cli.tune.run_tuning", tuner)
    return tuner


def test_options_reach_the_tuner(tuner, own_store):
    words = "tune 2x3x4 5x2x3x4 --dtype float16 --layout tn --device cpu --backends aten,cpp --search quick --timing eager --force"
    assert cli.run(words.split()) == 0
    assert tuner.problems == [
        Problem.mm(2, 3, 4, dtype=torch.float16, layout="tn", device_type="cpu"),
        Problem.bmm(5, 2, 3, 4, dtype=torch.float16, layout="tn", device_type="cpu"),
    ]
    assert tuner.device == "cpu"
    chosen = tuner.settings
    assert (chosen.backends, chosen.search, chosen.timing, chosen.tune) == (("aten", "cpp"), "quick", "eager", "force")


def test_options_for_a_busy_machine_reach_the_tuner(tuner, own_store, capsys):
    for words, again, busy in (
        ("", False, "repeat"),
        ("--again", True, "repeat"),
        ("--wait-quiet --again", True, "wait"),
        ("--accept-busy", False, "accept"),
    ):
        assert cli.run(["tune", "2x3x4", "--device", "cpu", *words.split()]) == 0
        assert (tuner.again, tuner.settings.busy) == (again, busy)
    assert cli.run(["tune", "2x3x4", "--wait-quiet", "--accept-busy"]) == 2
    assert "--wait-quiet: got --accept-busy too, expected one of them" in capsys.readouterr().err


def test_again_without_shapes_takes_what_a_busy_machine_has_stored(capsys, tuner, own_store):
    problems = [Problem.mm(m, 8, 8, dtype=torch.float32, device_type="cpu") for m in (16, 32, 64)]
    here, elsewhere = fingerprint_text(detect("cpu"), "graph"), fingerprint_text(detect("cpu"), "eager")
    why = {"disturbed": "other work"}
    rows = [(problems[0], here, why), (problems[1], elsewhere, why), (problems[2], here, {})]
    Store.open(own_store).put(
        Row(key=problem.key, fingerprint=machine, name="aten:mm", backend="aten", content_hash="x", status=Status.OK, time_us=1.0,
            finalist=True, baseline=True, info=info, measured_at="2020-01-02T03:04:05.000006+00:00")
        for problem, machine, info in rows
    )  # fmt: skip
    assert cli.run(["tune", "--again", "--device", "cpu"]) == 0
    assert (tuner.problems, tuner.again) == (problems[:1], True)
    assert tuner.tables == ()
    assert cli.run(["tune", "--again", "--device", "cpu", "--timing", "eager"]) == 0
    assert tuner.problems == problems[1:2]
    # Tables of the requested kind too, on one device and on several.
    segment = Segment(lo=2, hi=9, name="aten:mm", backend="aten", content_hash="x", sampled_m=4)
    for kind, problem in ((TABLE, problems[0]), (INVARIANT, problems[1])):
        table = Table(segments=(segment,), disturbed="other work", reduction="serial" * (kind == INVARIANT))
        Store.open(own_store).put_ranged(Ranged(key=problem.key, fingerprint=here, kind=kind, value=table.to_json()))
    assert cli.run(["tune", "--again", "--device", "cpu"]) == 0
    assert "1 batch-invariant table of a busy machine left: add --batch-invariant" in capsys.readouterr().err
    assert cli.run(["tune", "--again", "--device", "cpu", "--batch-invariant"]) == 0
    assert tuner.tables == ((problems[0], range(2, 10), False), (problems[1], range(2, 10), True))
    assert cli.run(["fleet", "--again", "--devices", "cpu", "--dry-run"]) == 0
    assert "2 jobs, " in capsys.readouterr().out
    assert cli.run(["fleet", "--again", "--ray", "auto"]) == 2
    assert cli.run(["tune", "--again", "--device", "cpu", "--dtype", "float16"]) == 2
    assert "--dtype: got no shapes for this option" in capsys.readouterr().err


def test_times_and_ratios_of_a_busy_machine_carry_a_mark(tuner, own_store, capsys):
    why = {"disturbed": "other processes used 80% of the cores"}
    slow = dataclasses.replace(TORCH, info=why)
    tuner.result = TuningResult((problem_result(dataclasses.replace(FAST, info=why), slow), problem_result(FAST, slow)))
    assert cli.run(["tune", "2x3x4", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith((FAST.name, TORCH.name)) and "--again" not in line]
    assert [line.endswith("on a busy machine") for line in rows] == [False, False, False, True]
    assert all(line.endswith("(on a busy machine)") for line in lines if line.startswith("pick: "))
    said = [line.split(": ")[0] for line in lines if "gemmtune tune --again" in line]
    assert said == ["all times", TORCH.name]
    assert lines[-1].endswith("; 2 of 2 on a busy machine")
    assert cli.run(["tune", "2x3x4", "--device", "cpu", "--quiet"]) == 0
    assert all("on a busy machine" in line for line in capsys.readouterr().out.splitlines())


def test_a_ratio_that_a_busy_machine_explains_is_withheld(tuner, own_store, capsys):
    slow = dataclasses.replace(TORCH, time_us=48e3, info={"disturbed": "other processes used 90% of the cores"})
    tuner.result = TuningResult((problem_result(FAST, TORCH), problem_result(FAST, slow), problem_result(FAST)))
    assert [result.speedup_over_torch is None for result in tuner.result] == [False, True, True]
    assert cli.run(["tune", "2x3x4", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line, summary = next(line for line in lines if "too disturbed" in line), lines[-1]
    assert "; too disturbed to compare with aten:mm, " in line
    assert "× torch" not in line
    assert "; over torch: geometric mean of 1 of 3 problems 2.50×" in summary
    assert summary.endswith("×; 1 too disturbed to compare with torch; 1 without a time to compare; 1 of 3 on a busy machine")


def test_a_budget_reaches_the_tuner_and_is_not_for_ranges(capsys, tuner, own_store):
    tuner.result = TuningResult((dataclasses.replace(problem_result(FAST, TORCH), partial="3 of 5 choices are not measured yet"),))
    assert cli.run(["tune", "2x3x4", "--device", "cpu", "--budget", "5"]) == 0
    assert tuner.budget_s == 5.0
    assert "partial: 3 of 5 choices are not measured yet; tune it again to go on" in capsys.readouterr().out
    assert cli.run(["tune", "1..8x3x4", "--device", "cpu", "--budget", "5"]) == 2
    assert cli.run(["tune", "2x3x4", "--device", "cpu", "--budget", "0"]) == 2


def test_settings_hold_where_no_option_is_given(tuner, own_store):
    assert cli.run(["tune", "2x3x4", "--device", "cpu"]) == 0
    assert tuner.settings.store_file == own_store
    assert (tuner.settings.tune, tuner.settings.search, tuner.settings.backends) == ("on_miss", "default", None)
    for given, used in (("force", "force"), ("never", "on_miss")):
        with settings.patch(tune=given):
            assert cli.run(["tune", "2x3x4", "--device", "cpu"]) == 0
        assert tuner.settings.tune == used


def test_tables_go_to_standard_output_and_progress_to_the_other(capsys, tuner, own_store):
    assert cli.run(["tune", "2x3x4", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].startswith("device: ")
    assert "pick: cpp:avx512_12x32, 2000 µs, 2.50× torch (aten:mm 5000 µs)" in printed.out
    assert isinstance(tuner.progress.progress, Lines)


def test_quiet_is_one_line_for_each_shape(capsys, tuner, own_store):
    assert cli.run(["tune", "2x3x4", "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr() == (
        "mm 16x4096x4096 float32 nt on cpu: pick: cpp:avx512_12x32, 2000 µs, 2.50× torch (aten:mm 5000 µs)\n",
        "",
    )
    assert type(tuner.progress.progress) is Progress


def test_json_has_every_choice_with_its_status(capsys, tuner, own_store, tmp_path):
    bad = failure("cpp:bad", Status.WRONG_RESULT, "error 3 × the bound")
    refused = Refusal(name="triton:mm", reason="no GPU")
    tuner.result = TuningResult((problem_result(FAST, TORCH, bad, refusals=(refused,)),))
    path = tmp_path / "result.json"
    assert cli.run(["tune", "2x3x4", "--device", "cpu", "--json", str(path)]) == 0
    [problem] = json.loads(path.read_text())
    assert problem["pick"] == "cpp:avx512_12x32"
    assert problem["speedup_over_torch"] == 2.5
    assert (problem["problem"]["m"], problem["problem"]["n"], problem["problem"]["k"]) == (16, 4096, 4096)
    wanted = ("name", "backend", "status", "time_us", "error_over_bound", "reason")
    assert [tuple(c[field] for field in wanted) for c in problem["choices"]] == [
        ("cpp:avx512_12x32", "cpp", "ok", 2000.0, 0.03125, ""),
        ("aten:mm", "aten", "ok", 5000.0, 0.03125, ""),
        ("cpp:bad", "cpp", "wrong_result", None, None, "error 3 × the bound"),
        ("triton:mm", "triton", "refused", None, None, "no GPU"),
    ]
    assert "pick: cpp:avx512_12x32" in capsys.readouterr().out


def test_json_on_standard_output_stands_alone(capsys, tuner, own_store):
    assert cli.run(["tune", "2x3x4", "--device", "cpu", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["pick"] == "cpp:avx512_12x32"


def test_rows_limits_the_table(capsys, tuner, own_store):
    tuner.result = TuningResult((problem_result(*(outcome(f"cpp:c{i}", 10.0 + i) for i in range(20))),))
    for rows, hidden in (("2", "… and 18 slower choices"), ("0", None)):
        assert cli.run(["tune", "2x3x4", "--device", "cpu", "--rows", rows]) == 0
        text = capsys.readouterr().out
        assert ("slower" in text) == (hidden is not None)
        assert hidden is None or hidden in text


def test_no_valid_choice_exits_with_1_and_names_them(capsys, tuner, own_store):
    tuner.result = TuningResult((problem_result(failure("cpp:a", Status.CRASHED, "SIGSEGV"), pick=None),))
    assert cli.run(["tune", "2x3x4", "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    assert "error: no valid choice for mm 16x4096x4096 float32 nt on cpu:\n  cpp:a: crashed: SIGSEGV" in err


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_results_without_a_store_are_printed_and_exit_with_1(capsys, tuner, tmp_path, quiet):
    with settings.patch(store_path=str(tmp_path)):
        assert cli.run(["tune", "2x3x4", "--device", "cpu", *quiet]) == 1
    printed = capsys.readouterr()
    assert "pick: cpp:avx512_12x32" in printed.out
    error = f"error: store: got {tmp_path}, a device, pipe or folder, expected a file. "
    assert printed.err.splitlines()[-1].startswith(error)
    assert printed.err.endswith(" The results are not stored.\n")
    assert len(printed.err.splitlines()) == (1 if quiet else 2)


def test_an_empty_problem_is_no_failure(tuner, own_store):
    empty = Problem.mm(0, 3, 4, dtype=torch.float32, device_type="cpu")
    tuner.result = TuningResult((problem_result(problem=empty),))
    assert cli.run(["tune", "0x3x4", "--device", "cpu"]) == 0


def test_a_file_of_shapes_with_entries_that_are_skipped(capsys, tuner, own_store, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([{"op": "mm", "m": 2, "n": 3, "k": 4}, {"name": "i8", "op": "scatter_mm", "m": 2, "n": 3, "k": 4}]))
    assert cli.run(["tune", "--shapes", str(path), "--device", "cpu", "--dtype", "float32"]) == 0
    assert tuner.problems == [Problem.mm(2, 3, 4, dtype=torch.float32, device_type="cpu")]
    assert f"skipped {path}: entry 2 (i8): scatter_mm is not an operation of this version" in capsys.readouterr().err


def test_a_file_with_nothing_to_tune_is_wrong_usage(capsys, tuner, own_store, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([{"op": "scatter_mm", "m": 2, "n": 3, "k": 4}]))
    assert cli.run(["tune", "--shapes", str(path), "--device", "cpu"]) == 2
    assert (
        f"error: --shapes: every entry of {path} was skipped, expected at least one that can be tuned here"
        in capsys.readouterr().err
    )
