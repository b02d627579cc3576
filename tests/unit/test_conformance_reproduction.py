"""Repeating single cases: the command lines, and the forms that --repro reads."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from gemmtune.conformance.bench.outcome import CaseStatus, Failure, Outcome, Record
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.options import RunOptions
from gemmtune.conformance.runs.files import cases_to_repeat, command, pytest_command, save_failing
from gemmtune.errors import CaseError, ConformanceError

CASE = Case(property_name="bound", dtype="bfloat16", m=127, n=64, k=33, a="col+4@1", b="row~0", seed=7)
OPTIONS = RunOptions(backend="mypkg.ops:matmul", device="cuda:1", trait=("out", "dtypes=float16"), level="full", in_process=True)


def test_commands_keep_the_options_that_change_a_case() -> None:
    line = command(OPTIONS, [CASE.id])
    assert shlex.split(line) == [
        "gemmtune", "conformance", "mypkg.ops:matmul", "--device", "cuda:1", "--trait", "out", "--trait", "dtypes=float16",
        "--in-process", "--repro", CASE.id,
    ]  # fmt: skip
    assert shlex.split(pytest_command(OPTIONS, [CASE.id])) == [
        "pytest", "-p", "gemmtune.conformance.plugin", "--pyargs", "gemmtune.conformance", "--gemm-backend=mypkg.ops:matmul",
        "--gemm-device", "cuda:1", "--gemm-trait", "out", "--gemm-trait", "dtypes=float16", "--gemm-in-process",
        "--gemm-repro", CASE.id,
    ]  # fmt: skip


def test_a_finding_of_the_sanitizer_is_repeated_with_it() -> None:
    assert " --sanitize " in command(OPTIONS, [CASE.id], sanitize=True)
    assert "sanitize" not in command(RunOptions(backend="x:f", sanitize=True), [CASE.id])


def test_a_saved_case_is_repeated_from_its_file_and_its_folder(tmp_path: Path) -> None:
    failure = Failure(property_name="bound", message="wrong", got=float("nan"), expected=float("inf"))
    outcome = Outcome(case=CASE, status=CaseStatus.FAILED, failures=(failure,))
    path = save_failing(str(tmp_path), OPTIONS, Record(case=CASE, outcome=outcome))
    data = json.loads(path.read_text())
    assert data["repeat"] == command(OPTIONS, [CASE.id])
    assert data["outcome"]["failures"][0] | {"got": "nan", "expected": "inf"} == data["outcome"]["failures"][0]
    assert cases_to_repeat([f"@{path}"]) == cases_to_repeat([str(tmp_path)]) == [CASE]


def test_cases_are_repeated_once_each_by_id_from_a_text_and_from_a_report(tmp_path: Path) -> None:
    text, report = tmp_path / "ids.txt", tmp_path / "report.json"
    text.write_text(f"# from yesterday\n{CASE.id}  # the first\n")
    report.write_text(json.dumps({"failures": [{"case": CASE.id}, {"case": "nan:mm-f32-1x1x1"}]}))
    cases = cases_to_repeat([CASE.id, f"@{text}", f"@{report}"])
    assert [case.id for case in cases] == [CASE.id, "nan:mm-f32-1x1x1"]


def test_rejects_words_that_name_no_case(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"failures": 3}')
    with pytest.raises(CaseError, match=r"case id: got 'bound', expected property:op-dtype"):
        cases_to_repeat(["bound"])
    with pytest.raises(ConformanceError, match=r"without \*\.json files, expected a folder of --save-failing"):
        cases_to_repeat([str(tmp_path / "empty")])
    with pytest.raises(ConformanceError, match="expected a file of case ids"):
        cases_to_repeat(["@nowhere"])
    with pytest.raises(ConformanceError, match="without a case"):
        cases_to_repeat([f"@{tmp_path / 'other.json'}"])


@pytest.mark.parametrize("text", ["", "# nothing failed\n", '{"failures": []}'])
def test_rejects_files_without_a_case(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    for word in (f"@{tmp_path / 'report.json'}", str(tmp_path)):
        with pytest.raises(ConformanceError, match=f"repro: got {word}, without a case, expected ids of cases or a report"):
            cases_to_repeat([word])
