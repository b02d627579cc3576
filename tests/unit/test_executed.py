"""The check of what a run executed: it accepts a complete run and rejects an incomplete one."""

from __future__ import annotations

from pathlib import Path

import executed
import pytest
from executed import VARIABLE, files, main, note, passed_files, wanted

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_x"><properties/></testcase>
<testcase classname="tests.unit.test_b.TestIt" name="test_x"/>
<testcase classname="tests.unit.test_c" name="test_x"><skipped message="no compiler"/></testcase>
<testcase classname="tests.unit.test_d" name="test_x"><failure/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return notes and results of a complete run."""
    notes, results = tmp_path / "notes", tmp_path / "results.xml"
    monkeypatch.setenv(VARIABLE, str(notes))
    for backend, name in wanted():
        note(backend, [name])
    cases = "".join(f'<testcase classname="{name}"/>' for name in files(Path(executed.__file__).parent))
    results.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return notes, results


def test_a_complete_run_passes(whole: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*whole) is None
    assert "of aten, cpp, tests of" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [("cpp", "bound"), ("aten", "scaled_mm"), ("gemmtune", "empty")], ids=" ".join)
def test_reports_a_property_or_operation_without_a_passed_case(whole: tuple[Path, Path], lost: tuple[str, str]) -> None:
    notes, results = whole
    notes.write_text("".join(line for line in notes.read_text().splitlines(keepends=True) if tuple(line.split()) != lost))
    assert main(notes, results) == f"too little was executed:\n  {lost[0]}: no case of {lost[1]} passed"


def test_reports_a_file_without_a_passed_test(whole: tuple[Path, Path]) -> None:
    notes, results = whole
    results.write_text(results.read_text().replace('<testcase classname="tests.correctness.test_triton"/>', ""))
    assert main(notes, results) == "too little was executed:\n  tests.correctness.test_triton: none of its tests passed"


def test_a_run_without_notes_fails(whole: tuple[Path, Path], tmp_path: Path) -> None:
    assert "cpp: no case of mm passed" in str(main(tmp_path / "nothing", whole[1]))


def test_only_passed_tests_count(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    assert passed_files(tmp_path / "results.xml") == {"tests.unit.test_a", "tests.unit.test_b"}


def test_files_for_a_gpu_only_need_no_passed_test() -> None:
    found = files(Path(executed.__file__).parent)
    assert "tests.unit.test_executed" in found
    assert "tests.correctness.test_triton_gpu" not in found


def test_notes_nothing_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    note("cpp", ["bound"])
    assert not list(tmp_path.iterdir())


def test_operations_match_those_of_the_backends() -> None:
    assert {name for backend, name in wanted() if backend == "cpp"} >= {"mm", "scaled_mm", "integers", "layouts"}
    assert ("cpp", "mm_plus_mm") not in wanted()
    assert ("aten", "mm_plus_mm") in wanted()
