"""Cases under compute-sanitizer: a fake one, which runs them on the CPU or invents findings, and the real one on a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conformance_gemms import torch_subject

from gemmtune.conformance.cases.case import Case
from gemmtune.conformance.cases.scope import Scope
from gemmtune.conformance.runs import sanitize as sanitizing
from gemmtune.conformance.runs.one_case import arguments_for, main
from gemmtune.conformance.runs.sanitize import few_cases, sanitize
from gemmtune.declaration.subject import SubjectSpec
from gemmtune.errors import UnavailableError

FAKE = """#!{python}
import os, re, subprocess, sys
given = sys.argv[1:]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
tool, log = (given[given.index(name) + 1] for name in ("--tool", "--log-file"))
command = given[given.index("no", given.index("--report-api-errors")) + 1 :]
command[command.index("--device") + 1] = "cpu"
report = open({behaviour!r}).read()
if "REFUSE" in report:
    open(log, "w").write("========= Error: Device not supported. Please refer to the documentation\\n")
    sys.exit(1)
if tool == "memcheck" and "WRONG" not in report:
    status = subprocess.run(command).returncode
else:  # as the cases say that they passed
    status = 0
    print('{{"verdict": "passed"}}\\n' * len(command[command.index("--") + 2 :]))
found = tool == "memcheck" and "WRONG" in report and any("k.9" in x or "x9-" in x for x in command)
block = report.partition("WRONG\\n")[2] if found else ""
summary = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
if tool != "racecheck":
    summary = f"ERROR SUMMARY: {{3 * found}} errors"
open(log, "w").write("========= COMPUTE-SANITIZER\\n" + block + "========= " + summary + "\\n")
sys.exit(status)
"""
ERROR = """WRONG
========= Invalid __global__ write of size 2 bytes
=========     at matmul_kernel+0x4b0 in gemm.py:31
=========     by thread (33,0,0) in block (1,0,0)
=========     Address 0x7f66dc400200 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaFree.
"""
SPEC = SubjectSpec(target="torch", declared={"out": True})
CASES = [
    Case(property_name="out-of-bounds", m=16, n=8, k=4, out="row"),
    Case(property_name="out-of-bounds", m=16, n=8, k=9, out="row"),
]
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Yield a function that puts a fake compute-sanitizer with the given behaviour on PATH."""

    def put(behaviour: str) -> None:
        (tmp_path / "behaviour").write_text(behaviour)
        program = tmp_path / "compute-sanitizer"
        program.write_text(FAKE.format(python=sys.executable, behaviour=str(tmp_path / "behaviour")))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    sanitizing._program.cache_clear()
    yield put
    sanitizing._program.cache_clear()


@pytest.mark.turn(0, 8)
def test_a_clean_run_has_no_findings(install: Install) -> None:
    install("fine")
    report = sanitize(SPEC, CASES[:1], "cuda", tools=("memcheck", "racecheck"))
    assert report.findings == ()
    assert report.executed == 2
    assert "compute-sanitizer memcheck, racecheck: 2 of 2 runs of cases" in report.text()
    assert "0 findings" in report.text()


def test_a_finding_is_attributed_to_its_case(install: Install) -> None:
    install(ERROR)
    report = sanitize(SPEC, CASES, "cuda:0", tools=("memcheck",))
    (finding,) = report.findings
    assert finding.case == CASES[1]
    assert finding.failure.property_name == "memcheck"
    assert finding.failure.message == (
        "Invalid __global__ write of size 2 bytes, at matmul_kernel+0x4b0 in gemm.py:31, by thread (33,0,0) in block (1,0,0), "
        "Address 0x7f66dc400200 is out of bounds"
    )
    assert "out-of-bounds:mm-f32-16x8x9-out.row\n    Invalid __global__ write" in report.text()


def test_a_sanitizer_that_refuses_the_device(install: Install) -> None:
    install("REFUSE")
    with pytest.raises(UnavailableError, match=r"--tool memcheck did not run the cases: .*Device not supported"):
        sanitize(SPEC, CASES, "cuda", tools=("memcheck",))


@pytest.mark.turn(3, 8)
def test_a_gemm_that_cannot_be_loaded(install: Install) -> None:
    install("fine")
    with pytest.raises(UnavailableError, match=r"did not run the cases: .*there is no module 'nowhere'"):
        sanitize(SubjectSpec(target="nowhere:mm"), CASES[:1], "cuda", tools=("memcheck",))


def test_a_run_that_does_not_end(install: Install) -> None:
    install("fine")
    with pytest.raises(UnavailableError, match=r"no end after 0\.05 s, expected one; run fewer cases or tools"):
        sanitize(SPEC, CASES, "cuda", tools=("memcheck",), timeout_s=0.05)


def test_no_sanitizer_and_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="got device cpu, expected a CUDA device"):
        sanitize(SPEC, CASES, "cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    sanitizing._program.cache_clear()
    with pytest.raises(UnavailableError, match="there is no compute-sanitizer on PATH or in CUDA_HOME"):
        sanitize(SPEC, CASES, "cuda")


def test_the_sanitizer_of_cuda_home_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, install: Install) -> None:
    install("fine")
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "compute-sanitizer").rename(tmp_path / "cuda" / "bin" / "compute-sanitizer")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path / "cuda"))
    assert sanitizing._program() == str(tmp_path / "cuda" / "bin" / "compute-sanitizer")


def test_few_cases() -> None:
    cases = few_cases(Scope(traits=torch_subject().traits, device_type="cuda"))
    assert {case.op for case in cases} == {"mm", "addmm", "bmm", "baddbmm"}
    assert {case.property_name for case in cases} == {"out-of-bounds", "unwritten", "alignment"}
    assert len(cases) <= 24


def test_one_case_prints_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments_for(SPEC, CASES, "cpu")) == 0
    outcomes = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(o["case"], o["verdict"]) for o in outcomes] == [(case.id, "passed") for case in CASES]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["torch", "nonsense"], "case id: got 'nonsense', expected property:op-dtype-[Bx]MxNxK"),
        (["nowhere:mm", CASES[0].id], "there is no module 'nowhere' here"),
        (["torch", CASES[0].id, "--declared", "{"], "Expecting property name"),
    ],
)
def test_one_case_says_what_is_wrong(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
def test_torch_is_clean_under_the_real_sanitizer() -> None:
    cases = few_cases(Scope(traits=torch_subject().traits, device_type="cuda"))[:4]
    try:
        report = sanitize(SPEC, cases, "cuda", tools=("memcheck",))
    except UnavailableError as error:
        pytest.skip(str(error))
    assert report.executed == len(cases)
    assert report.findings == (), report.text()
