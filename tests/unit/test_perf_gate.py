"""The gate and its command: references, baselines, exit statuses. Processes are fake, except in one test."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence

import pytest
import torch

from gemmtune import cli, settings
from gemmtune.device import detect
from gemmtune.errors import GateError
from gemmtune.perf_gate.baselines import Baselines
from gemmtune.perf_gate.gate import problems_without_names, run_gate
from gemmtune.perf_gate.options import GateOptions
from gemmtune.perf_gate.sampling import FreshProcess, Match, ProcessSample, Sampling
from gemmtune.perf_gate.statistics import Decision
from gemmtune.perf_gate.subjects import TORCH, subject_for
from gemmtune.problem import Problem

CPU = detect("cpu")
ONE, TWO = (Problem.mm(m, 32, 64, dtype=torch.float32, device_type="cpu") for m in (16, 48))
Finds = Callable[..., None]


@pytest.fixture
def finds(monkeypatch, own_store, tmp_path):
    """Return finds({M: log ratio or reason of a failure}), which sets the result of all processes, in a new working folder."""
    monkeypatch.chdir(tmp_path)

    def plan(found: dict[int, float | str]) -> None:
        def process(matches: Sequence[Match], turn: int) -> list[ProcessSample | str]:
            results: list[ProcessSample | str] = []
            for match in matches:
                value = found[match.problem.m]
                if not isinstance(value, str):
                    value = ProcessSample(log_ratio=value + 0.001 * (turn % 3), candidate_us=5.0, reference_us=5.0, blocks=30)
                results.append(value)
            return results

        monkeypatch.setattr("gemmtune.perf_gate.gate.FreshProcess", lambda **_: process)

    with settings.patch(backends=("aten",)):
        yield plan


def test_verdicts_of_a_suite(finds):
    finds({16: 0.0, 48: 0.1})
    result = run_gate([ONE, TWO, ONE], GateOptions(device="cpu"))
    assert [entry.judgement.decision for entry in result.entries] == [Decision.PASS, Decision.REGRESSED]
    assert [entry.candidate for entry in result.entries] == ["aten:mm", "aten:mm"]
    assert (result.decision, result.exit_status) == (Decision.REGRESSED, 1)
    assert result.entries[1].ratio == pytest.approx(1.106, abs=1e-3)


def test_a_problem_that_cannot_be_measured(finds):
    finds({16: "ValueError: no", 48: 0.0})
    result = run_gate([ONE, TWO], GateOptions(device="cpu"))
    assert [entry.series.failure for entry in result.entries] == ["ValueError: no", ""]
    assert (result.decision, result.exit_status) == (Decision.INCONCLUSIVE, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"backends": ("own",), "extra_choices": ("conformance_functions:refuses",)},
            "NotImplementedError: not today\n  but tomorrow\nMend one",
        ),
        ({"backends": ("cpp",), "tune": "never"}, "pick: got none, so torch runs; expected one in the store"),
    ],
    ids=["refuses", "untuned"],
)
def test_torch_in_place_of_a_pick_is_not_measured(finds, changes: dict[str, object], reason: str):
    """A broken kernel that was no faster than torch passed, since torch's time was compared with its baseline."""
    finds({16: -0.4})
    options = GateOptions(device="cpu", update_baseline=True)
    run_gate([ONE], options)
    held = dataclasses.replace(options, update_baseline=False, require_baseline=True, reference="baseline")
    with settings.patch(**changes):
        result = run_gate([ONE], held)
    assert reason in result.entries[0].series.failure
    assert result.exit_status == 2


@pytest.mark.parametrize(("strict", "status"), [(False, 0), (True, 3)])
def test_strict_fails_if_one_problem_is_not_judged(finds, strict: bool, status: int):
    finds({16: -0.4})
    run_gate([ONE], GateOptions(device="cpu", update_baseline=True))
    finds({16: -0.4, 48: -0.1})
    result = run_gate([ONE, TWO], GateOptions(device="cpu", reference="baseline", strict=strict))
    assert [entry.judgement.decision for entry in result.entries] == [Decision.PASS, Decision.INCONCLUSIVE]
    assert result.exit_status == status


def test_writes_a_baseline_and_compares_with_it(finds):
    finds({16: -0.4, 48: -0.1})
    options = GateOptions(device="cpu", update_baseline=True)
    result = run_gate([ONE, TWO], options)
    assert [len(entry.series.batches) for entry in result.entries] == [2, 2]
    held = dataclasses.replace(options, update_baseline=False, require_baseline=True, reference="baseline")
    assert problems_without_names(held) == [ONE, TWO]
    assert run_gate([ONE, TWO], held).exit_status == 0
    finds({16: -0.3, 48: -0.1})
    result = run_gate([ONE, TWO], held)
    assert [entry.judgement.decision for entry in result.entries] == [Decision.REGRESSED, Decision.PASS]
    assert result.entries[0].change == pytest.approx(1.105, abs=1e-3)
    assert result.exit_status == 1


def test_updating_one_problem_keeps_the_others(finds):
    finds({16: -0.4, 48: -0.1})
    options = GateOptions(device="cpu", update_baseline=True)
    run_gate([ONE, TWO], options)
    finds({16: -0.2})
    run_gate([ONE], options)
    baselines = Baselines.of(options.baselines, CPU)
    assert [round(b.log_ratio, 1) for b in baselines.entries.values()] == [-0.2, -0.1]


def test_a_noisy_measurement_is_not_written_as_a_baseline(finds, monkeypatch):
    finds({})
    noisy = [ProcessSample(log_ratio=x, candidate_us=1.0, reference_us=1.0, blocks=30) for x in (0.3, -0.3, 0.1)]
    monkeypatch.setattr("gemmtune.perf_gate.gate.FreshProcess", lambda **_: lambda _, turn: [noisy[turn % 3]])
    result = run_gate([ONE], GateOptions(device="cpu", update_baseline=True))
    assert result.entries[0].notes == ["too noisy for a baseline, so none was written: measure on an idle machine"]
    assert result.exit_status == 3
    assert Baselines.of("benchmarks/baselines", CPU).entries == {}


def test_another_pick_and_other_versions_are_reported(finds):
    finds({16: -0.4})
    run_gate([ONE], GateOptions(device="cpu", update_baseline=True))
    baselines = Baselines.of("benchmarks/baselines", CPU)
    [old] = baselines.entries.values()
    baselines.put(dataclasses.replace(old, pick="cpp:x", versions=dict(old.versions) | {"torch": "1.0"}))
    baselines.write()
    [entry] = run_gate([ONE], GateOptions(device="cpu", reference="baseline")).entries
    assert entry.notes == [
        "another pick than the baseline's, which was cpp:x",
        f"since the baseline, torch: was 1.0, is {torch.__version__}",
    ]


def test_a_missing_baseline_is_inconclusive_and_not_measured(finds):
    finds({})
    result = run_gate([ONE], GateOptions(device="cpu", reference="baseline"))
    [entry] = result.entries
    assert entry.judgement.decision is Decision.INCONCLUSIVE
    assert entry.judgement.reason.startswith("no baseline in benchmarks/baselines/cpu-")
    assert result.exit_status == 3, "nothing was judged"
    required = GateOptions(device="cpu", reference="baseline", require_baseline=True)
    assert run_gate([ONE], required).exit_status == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "cublas"}, "reference: got 'cublas', expected one of torch, baseline"),
        ({"limit": 0.0}, "limit: got 0.0, expected a percentage above 0, up to 100"),
        ({"processes": 2}, "processes: got 2, expected at least 3"),
        ({"candidate": "torch", "reference": "baseline"}, "baselines: got the candidate 'torch', expected none"),
        ({"require_baseline": True}, "require_baseline: got reference 'torch', expected 'baseline'"),
    ],
)
def test_rejects_conflicting_options(options, message):
    with pytest.raises(GateError, match=message):
        GateOptions(**options)


def test_rejects_unsuitable_problems():
    with pytest.raises(GateError, match="problems: got none"):
        run_gate([], GateOptions(device="cpu"))
    with pytest.raises(GateError, match="on cuda, expected problems for cpu"):
        run_gate([dataclasses.replace(ONE, device_type="cuda")], GateOptions(device="cpu"))


def test_without_names_and_baselines_there_is_a_small_set_of_problems(finds):
    for options in (GateOptions(device="cpu"), GateOptions(device="cpu", reference="baseline")):
        problems = problems_without_names(options)
        assert len(set(problems)) == len(problems) > 3
        assert {p.device_type for p in problems} == {"cpu"}


class TestCommand:
    SHAPES = ("perf-gate", "16x32x64", "48x32x64", "--dtype", "float32", "--device", "cpu")

    def test_passing(self, capsys, finds):
        finds({16: 0.0, 48: -0.1})
        assert cli.run([*self.SHAPES, "--quiet"]) == 0
        out, err = capsys.readouterr()
        assert "IMPROVED: 2 problems, 1 IMPROVED, 1 PASS; the limit is 2% slower than torch, with 7 processes in a batch" in out
        assert err == ""

    def test_a_regression(self, capsys, finds, tmp_path):
        finds({16: 0.0, 48: 0.1})
        assert cli.run([*self.SHAPES, "--json", str(tmp_path / "gate.json")]) == 1
        out, err = capsys.readouterr()
        assert "REGRESSED: 2 problems" in out
        assert "batch 2, process 7 of 7: 1 problem" in err
        data = json.loads((tmp_path / "gate.json").read_text())
        assert [p["verdict"] for p in data["problems"]] == ["PASS", "REGRESSED"]
        assert [len(batch) for batch in data["problems"][1]["log_ratios"]] == [7, 7]
        assert data["problems"][1]["judged"]["lower"] > 1.02
        gate, page = str(tmp_path / "gate.json"), tmp_path / "page.html"
        assert cli.run(["report", gate, "--html", str(page)]) == 0
        assert re.search(r'<td class="bad[^"]*">REGRESSED', page.read_text())
        capsys.readouterr()
        assert cli.run(["report", gate]) == 0
        assert "\n- mm 48x32x64 float32 nt on cpu: REGRESSED" in capsys.readouterr().out

    def test_a_run_that_judges_nothing_has_a_status_of_its_own(self, capsys, finds):
        finds({})
        assert cli.run([*self.SHAPES, "--reference", "baseline"]) == 3
        assert "warning: INCONCLUSIVE: 2 of 2 problems were NOT judged; the reasons are above" in capsys.readouterr().err

    def test_required_baselines(self, capsys, finds):
        finds({16: -0.4, 48: -0.1})
        assert cli.run([*self.SHAPES, "--gemm-require-baseline"]) == 1
        assert "warning: 2 required baselines missing from benchmarks/baselines/cpu-" in capsys.readouterr().err
        assert cli.run([*self.SHAPES, "--update-baseline"]) == 0
        assert cli.run(["perf-gate", "--device", "cpu", "--require-baseline"]) == 0
        out = capsys.readouterr().out
        assert "mm 48x32x64 float32 nt on cpu" in out
        assert "baseline" in out

    def test_a_failed_measurement(self, capsys, finds):
        finds({16: "WorkerCrashed: died by SIGSEGV", 48: 0.0})
        assert cli.run(list(self.SHAPES)) == 2
        assert "WorkerCrashed: died by SIGSEGV" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["16x32", "--device", "cpu"], "shape: got '16x32', expected MxNxK"),
            (["--dtype", "float32", "--device", "cpu"], "--dtype: got no shapes for this option"),
            (
                ["16x32x64", "--device", "cpu", "--reference", "torch", "--require-baseline"],
                "--require-baseline: got reference 'torch'",
            ),
            (["16x32x64", "--device", "cuda:77"], "device: got"),
        ],
    )
    def test_rejects_unusable_arguments(self, capsys, finds, words, message):
        finds({})
        assert cli.run(["perf-gate", *words]) == 2
        assert message in capsys.readouterr().err


def test_fresh_processes_measure_and_survive_a_crash(own_store):
    """Measure three matches in one process. The middle one fails, and the others are timed."""
    names = (TORCH, "perf_functions:crash", "perf_functions:matmul")
    chosen = settings.current()
    candidates = [subject_for(name, ONE, CPU, chosen) for name in names]
    reference = subject_for(TORCH, ONE, CPU, chosen)
    process = FreshProcess(device=dataclasses.replace(CPU, threads=1), settings=chosen, sampling=Sampling(warm_up_s=0))
    first, second, third = process([Match(problem=ONE, candidate=c, reference=reference) for c in candidates], 0)
    assert isinstance(first, ProcessSample)
    assert isinstance(third, ProcessSample)
    assert min(first.blocks, third.blocks) >= Sampling().least_blocks
    assert second == "ValueError: got (16, 64), expected something else"
