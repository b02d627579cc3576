"""Engines of ``--sm`` and ``--sanitize``, started by the command and by pytest."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from gemmtune import cli
from gemmtune.architectures import matrix_problems, run_matrix
from gemmtune.conformance.bench.outcome import Failure
from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.runs import matrices
from gemmtune.conformance.runs import run as runs
from gemmtune.conformance.runs.sanitize import Finding, SanitizerReport
from gemmtune.conformance.suite import test_conformance as suite_tests

SUITE = Path(suite_tests.__file__).parent


class TestArchitectures:
    @pytest.fixture(autouse=True)
    def _few_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton", reason="compiles with Triton")
        few = {"mm-bf16-nt": matrix_problems()["mm-bf16-nt"]}
        monkeypatch.setattr(matrices, "run_matrix", functools.partial(run_matrix, problems=few, most=2))

    @pytest.mark.turn(5, 8)
    def test_the_command_compiles_and_reports(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        status = cli.run(["conformance", "--sm", "80", "--device", "cpu", "--json", str(tmp_path / "r.json")])
        out = capsys.readouterr().out
        assert status == 0, out
        assert out.startswith("sm80: 2 kernels of 1 problem, search quick")
        [report] = json.loads((tmp_path / "r.json").read_text())
        assert (report["arch"], report["executed"], report["failures"]) == ("sm80", 2, [])

    @pytest.mark.turn(0, 8)
    def test_pytest_has_a_test_for_each_architecture(self, capfd: pytest.CaptureFixture[str]) -> None:
        arguments = ["-c", str(SUITE / "pytest.ini"), f"--rootdir={SUITE}", "-p", "no:cacheprovider", "-n0", str(SUITE)]
        status = pytest.main([*arguments, "--gemm-sm=75,90", "--gemm-device=cpu"])
        out = capfd.readouterr().out
        assert status == 0, out
        assert "2 passed" in out
        assert out.index("sm75: 2 kernels of 1 problem") < out.index("sm90: 2 kernels of 1 problem")

    def test_a_required_run_that_cannot_happen_is_a_failure(self) -> None:
        options = runs.RunOptions(sm=("90",), device="cpu")
        assert matrices.exit_status([matrices.matrix(options, "90")]) == 0
        report = matrices.matrix(options, "90", must_run=True)
        assert report.failures == ("sm90 was to be run, but cannot be: no GPU here: sm90 was compiled for and not run",)
        assert matrices.exit_status([report]) == 1
        assert matrices.exit_status([]) == 2


class TestSanitizer:
    def run(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
        arguments = ["--device", "cpu", "--sanitize", "--in-process", "-k", "sanitizer"]
        status = cli.run(["conformance", "conformance_functions:right", *arguments])
        return status, capsys.readouterr().out

    @pytest.fixture(autouse=True)
    def _as_if_on_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runs, "_check_sanitizer", lambda device: None)

    def report(self, cases: tuple[Case, ...], *found: Failure, executed: bool = True) -> SanitizerReport:
        findings = tuple(Finding(tool=failure.property_name, case=cases[0], failure=failure) for failure in found)
        return SanitizerReport(tools=("memcheck",), cases=cases, executed=executed * len(cases), findings=findings, seconds=1.0)

    def test_a_finding_is_a_separate_failure(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        failure = Failure(property_name="memcheck", message="Invalid __global__ write of size 2 bytes")
        monkeypatch.setattr(suite_tests, "sanitize", lambda spec, cases, device: self.report(cases, failure))
        status, out = self.run(capsys)
        assert status == 1
        assert "1 case of memcheck: Invalid __global__ write of size 2 bytes" in out
        assert "compute-sanitizer memcheck: " in out
        assert "again: gemmtune conformance conformance_functions:right --device cpu --sanitize --in-process --repro " in out

    def test_status_follows_the_sanitized_cases(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(suite_tests, "sanitize", lambda spec, cases, device: self.report(cases))
        status, out = self.run(capsys)
        assert status == 0, out
        assert "CONFORMS under compute-sanitizer, which is all that ran: 0 cases executed, 0 refused, 4 runs under" in out
        monkeypatch.setattr(suite_tests, "sanitize", lambda spec, cases, device: self.report(cases, executed=False))
        status, out = self.run(capsys)
        assert status == 2
        assert "NOT TESTED" in out

    def test_a_missing_sanitizer_is_an_error(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def missing(*_: object) -> SanitizerReport:
            raise runs.ConformanceError("sanitize: there is no compute-sanitizer on PATH")

        monkeypatch.setattr(suite_tests, "sanitize", missing)
        status, out = self.run(capsys)
        assert status == 2
        assert "sanitize: there is no compute-sanitizer on PATH" in out
