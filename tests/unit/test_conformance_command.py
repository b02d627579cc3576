"""The command ``gemmtune conformance``, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemmtune import cli
from gemmtune.conformance.cases.case import Case

pytestmark = pytest.mark.usefixtures("_not_in_ci")
IDS = [f"integers:mm-f32-17x33x65-seed.{seed}" for seed in (1, 2, 3)]
WRONG = ["--device", "cpu"] + [word for case_id in IDS for word in ("--repro", case_id)]
"""Arguments for three cases in which ``drops_last`` is wrong."""
F32 = ("--dtype", "f32", "--device", "cpu")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def _not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def conformance(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs ``gemmtune conformance`` in an empty folder. By default, cases run in this process."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str, isolated: bool = False) -> Result:
        capsys.readouterr()
        where = () if isolated else ("--in-process",)
        status = cli.run(["conformance", f"conformance_functions:{name}", *where, *arguments])
        out, err = capsys.readouterr()
        return Result(status=status, out=out, err=err)

    return call


class TestVerdicts:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("none", "result: returned NoneType, expected a tensor"),
            ("coroutine", "result: returned coroutine, expected a tensor"),
            ("list", "result: returned list, expected a tensor"),
            ("numpy", "result: returned ndarray, expected a tensor"),
            ("sparse", "result: returned a tensor of the layout torch.sparse_coo, expected a dense tensor"),
            ("device", "result: returned float32[17, 33] on meta, expected float32[17, 33] on cpu"),
            ("dtype", "result: returned float64[17, 33] on cpu, expected float32[17, 33] on cpu"),
            ("shape", "result: returned float32[561] on cpu, expected float32[17, 33] on cpu"),
        ],
    )
    def test_what_cannot_be_compared_conforms_to_nothing(self, conformance: Command, kind: str, expected: str) -> None:
        done = conformance(f"returns_{kind}", *WRONG, "--json", "report.json")
        report = json.loads(Path("report.json").read_text(encoding="utf-8"))
        assert done.status == 1, done.out + done.err
        assert {p["name"] for p in report["properties"] if p["verdict"] == "CONFORMS"} == set()
        [integers] = [p for p in report["properties"] if p["name"] == "integers"]
        assert (integers["verdict"], integers["executed"], integers["cut_short"]) == ("NOT TESTED", 3, 3)
        assert integers["reason"].startswith(f"every case that ran was cut short by a failure of {expected}")
        assert {(found["property"], found["verdict"]) for found in report["failures"]} == {("result", "failed")}

    def test_a_right_gemm_conforms(self, conformance: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", "gemmtune"):
            done = conformance("right", *F32, "-k", "identity or scaling")
        assert done.status == 0, done.out + done.err
        assert done.out.splitlines()[0].split() == ["GEMM", "conformance_functions:right"]
        assert "CONFORMS in 2 of " in done.out
        assert "  identity: " in caplog.text
        assert list(tmp_path.iterdir()) == []

    def test_a_wrong_gemm_fails_and_the_report_shows_how_to_repeat_it(self, conformance: Command) -> None:
        done = conformance("drops_last", *F32, "--property", "integers", "-k", "17x33")
        assert done.status == 1
        assert "elements are wrong" in done.out
        assert "in the tile of 16 (" in done.out
        again = next(line for line in done.out.splitlines() if line.strip().startswith("again: "))
        assert again.startswith(
            "  again: gemmtune conformance conformance_functions:drops_last --device cpu --in-process --repro integers:mm"
        )
        repeated = conformance("drops_last", "--repro", again.split()[-1])
        assert repeated.status == 1
        assert "1 case executed" in repeated.out

    def test_the_violated_property_fails(self, conformance: Command) -> None:
        done = conformance("writes_to_its_input", *F32, "--property", "identity")
        assert done.status == 1
        assert "of inputs-unchanged: the call changed its input a" in done.out

    def test_a_gemm_that_refuses_everything_is_not_tested(self, conformance: Command) -> None:
        done = conformance("refuses", *F32, "--property", "integers")
        assert done.status == 2
        assert "NOT TESTED: every case was refused" in done.out
        assert "NotImplementedError: not today" in done.out

    def test_refusing_a_declared_case_is_a_failure(self, conformance: Command) -> None:
        done = conformance("refuses", *F32, "--property", "integers", "--trait", "dtypes=float32", "--trait", "layouts=row")
        assert done.status == 1
        assert "raised for what it declares: NotImplementedError: not today\n      but tomorrow\n" in done.out

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("nothing",), "error: conformance_functions:nothing: module 'conformance_functions' has no attribute 'nothing'"),
            (("right", "--device", "tpu"), "error: --device: got 'tpu', expected cpu, cuda or cuda:N"),
            (("right", "--trait", "devices=cuda", "--device", "cpu"), "got device cpu, expected one that it declares: cuda"),
            (("right", "--repro", "bound"), "error: case id: got 'bound', expected property:op-dtype"),
            (("right", "--dtype", "f17"), "error: --dtype: got 'f17', expected one of float64"),
            (("right", "--level", "huge"), "Invalid value for '--level': 'huge' is not one of"),
            (("right", "--device", "cpu", "--sanitize"), "error: --sanitize: got device cpu, expected a CUDA device"),
            (("right", "-k", "no such case"), "NOT TESTED"),
            (
                ("right", "--op", "bmm"),
                "error: --op: got bmm, expected what the GEMM declares: mm; declare more with --trait ops=…",
            ),
            (
                ("right", "--dtype", "bf16", "--trait", "dtypes=float16"),
                "error: --dtype: got bfloat16, expected what the GEMM declares: float16; declare more with --trait dtypes=…",
            ),
            (
                ("right", "--layout", "every2", "--trait", "layouts=row,col"),
                "error: --layout: got every2, expected what the GEMM declares: row, col; declare more with --trait layouts=…",
            ),
        ],
    )
    def test_an_untestable_gemm_has_status_2_and_a_reason(
        self, conformance: Command, arguments: tuple[str, ...], text: str
    ) -> None:
        done = conformance(*arguments)
        assert done.status == 2
        assert text in done.out + done.err

    def test_requires_a_gemm(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.run(["conformance"]) == 2
        assert "got no GEMM, expected package.module:function" in capsys.readouterr().err

    def test_too_few_executed_cases_fail(self, conformance: Command) -> None:
        done = conformance("right", *F32, "--property", "identity", "--min-executed", "1000")
        assert done.status == 1
        assert "expected at least 1000 (min_executed)" in done.out


class TestNarrowing:
    def test_runs_a_single_property(self, conformance: Command) -> None:
        done = conformance("right", *F32, "--property", "identity,scaling")
        assert done.status == 0, done.out
        assert "CONFORMS in 2 of " in done.out

    @pytest.mark.turn(3, 8)
    def test_a_sample_has_some_cases_of_each_property(self, conformance: Command) -> None:
        data = json.loads(conformance("right", "--device", "cpu", "--max-cases", "60", "--json", "-").out)
        assert (data["verdict"], data["executed"]) == ("CONFORMS", 60)
        assert data["sample"]["cases"] == 60 < data["sample"]["of"]
        assert sum(p["verdict"] == "CONFORMS" for p in data["properties"]) > 20
        assert not any("sample" in p["reason"] for p in data["properties"])
        assert data["notes"] == [f"sampled 60 of {data['sample']['of']} cases, seed 0"]

    def test_a_sample_draws_cases_only_with_max_examples(self, conformance: Command) -> None:
        picked = ("--device", "cpu", "--property", "integers", "--max-cases", "5", "--json", "-")
        assert json.loads(conformance("right", *picked).out)["executed"] == 5
        assert json.loads(conformance("right", *picked, "--max-examples", "3").out)["executed"] > 5

    @pytest.mark.turn(2, 8)
    def test_starts_no_case_after_the_time_limit(self, conformance: Command) -> None:
        done = conformance("right", *F32, "--max-seconds", "0.5", "--json", "-")
        data = json.loads(done.out)
        assert done.status == 0
        assert 0 < data["executed"] < data["sample"]["of"]
        assert data["not_run"][0]["reason"] == "not run: the time was over (0.5 s)"
        sample = data["sample"]
        assert f"sampled {sample['cases'] - sample['not_run']} of {sample['of']} cases in 0.5 s, seed 0" in data["notes"][0]


class TestReports:
    def test_json_and_html_files(self, conformance: Command, tmp_path: Path) -> None:
        done = conformance("drops_last", *WRONG, "--json", "r.json", "--html", "r.html", "--save-failing", "bad")
        data = json.loads((tmp_path / "r.json").read_text())
        assert (done.status, data["exit_status"], data["verdict"]) == (1, 1, "FAILS")
        assert data["failed"] == len(list((tmp_path / "bad").iterdir())) == 3
        page = (tmp_path / "r.html").read_text()
        assert "up to 4 times the tolerance" in page
        assert data["failures"][0]["repeat"] in page
        again = conformance("drops_last", "--repro", "bad", "--json", "-")
        assert json.loads(again.out)["executed"] == data["failed"]

    def test_json_on_standard_output_is_the_only_output(self, conformance: Command) -> None:
        done = conformance("right", *F32, "--property", "identity", "--json", "-")
        assert done.status == 0
        assert json.loads(done.out)["properties"]


class TestLists:
    def test_known_failures_and_skipped_cases(self, conformance: Command, tmp_path: Path) -> None:
        (tmp_path / "known.txt").write_text(f"{IDS[0]}  # issue 12\n{IDS[1][:-1]}?\n")
        (tmp_path / "skips.txt").write_text(f"{IDS[2]}  # takes too long\nwidth:mm-f99-*\n")
        narrow = ("--trait", "ops=mm", "--trait", "dtypes=float32", "--trait", "layouts=row")  # few cases, even at all levels
        lists = (*narrow, "--xfails-file", "known.txt", "--skips-file", "skips.txt")
        done = conformance("drops_last", *WRONG, *lists, "--json", "r.json")
        assert done.status == 0, done.out
        assert "warning: skips.txt:2: no case has the id 'width:mm-f99-*'" in done.out
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["not_run"] == [{"reason": "takes too long", "count": 1, "cases": [IDS[2]]}]
        assert report["known"] == [{"case": i, "reason": r} for i, r in zip(IDS, ("issue 12", "no reason is given"), strict=False)]
        assert conformance("drops_last", *WRONG, *lists, "--strict-lists").status == 1

    def test_a_known_failure_that_passes_is_an_error(self, conformance: Command, tmp_path: Path) -> None:
        (tmp_path / "known.txt").write_text("identity:*  # issue 12\n")
        done = conformance("right", *F32, "--property", "identity", "--xfails-file", "known.txt")
        assert done.status == 1
        assert "is listed as known to fail (issue 12), but passes: remove the line" in done.out


class TestDrawing:
    @pytest.mark.turn(4, 8)
    def test_the_smallest_failing_case_is_reported(self, conformance: Command) -> None:
        done = conformance("drops_last", *F32, "--property", "bound", "-k", "test_drawn", "--json", "-", "--max-examples", "30")
        [found] = json.loads(done.out)["failures"]
        assert found["drawn"]
        case = Case.parse(found["case"])
        assert case.m * case.n <= 2
        assert 17 <= case.k <= 40

    def test_the_same_cases_are_drawn_again_and_others_with_another_seed(self, conformance: Command, tmp_path: Path) -> None:
        def drawn(*arguments: str) -> list[str]:
            (tmp_path / "none.txt").write_text("bound:*  # only to see the ids\n")
            picked = ("--property", "bound", "-k", "test_drawn", "--max-examples", "5", "--skips-file", "none.txt", "--json", "-")
            [entry] = json.loads(conformance("right", *F32, *picked, *arguments).out)["not_run"]
            return list(entry["cases"])

        first = drawn()
        assert 0 < len(first) <= 5
        assert drawn("--derandomize") == first
        assert drawn("--seed", "1") == drawn("--seed", "1") != first


class TestIsolation:
    @pytest.mark.turn(7, 8)
    @pytest.mark.parametrize(
        ("name", "looks_like", "message"),
        [
            ("aborts", "the process died", "died by SIGABRT"),
            ("hangs", "no answer in time", "no answer within 2 s"),
        ],
    )
    def test_a_crash_or_a_hang_is_one_failure_and_the_run_goes_on(
        self, conformance: Command, name: str, looks_like: str, message: str
    ) -> None:
        ids = [f"identity:mm-f32-{size}" for size in ("1x1x1", "17x3x3", "2x2x2")]
        repeat = ["--device", "cpu"] + [word for case_id in ids for word in ("--repro", case_id)]
        done = conformance(name, *repeat, "--timeout", "2" if name == "hangs" else "60", isolated=True)
        assert done.status == 1, done.out
        assert f"1 case of identity: {looks_like}" in done.out
        assert message in done.out
        assert "3 cases executed" in done.out
        assert f"--repro {ids[1]}" in done.out

    @pytest.mark.parametrize(
        ("name", "fault"),
        [
            ("right", "CONFORMS in 1 of"),
            ("returns_its_input", "1 case of result: an input is returned as the result"),
            ("writes_behind", "it overwrites its inputs: it writes behind the end of one"),
        ],
    )
    def test_faults_of_memory_show_although_the_process_gets_copies(self, conformance: Command, name: str, fault: str) -> None:
        repeat = [word for m in (3, 5) for word in ("--repro", f"identity:mm-f32-{m}x4x4")]
        done = conformance(name, "--device", "cpu", *repeat, isolated=True)
        assert done.status == (name != "right"), done.out
        assert fault in done.out

    @pytest.mark.parametrize("name", ["in_torchs_order", "by_keyword"])
    def test_the_added_operand_goes_where_the_function_takes_it(self, conformance: Command, name: str) -> None:
        repeat = [word for m in (3, 5) for word in ("--repro", f"integers:addmm-f32-{m}x4x4-alpha.general")]
        done = conformance(name, "--device", "cpu", *repeat, isolated=True)
        assert "2 cases executed" in done.out, done.out
        assert "1 case of integers: an error is raised" in done.out
        assert "raised for what it declares: NotImplementedError: three rows" in done.out
