"""Cases under NVIDIA's compute-sanitizer, which finds kernels that access memory out of bounds, race, or read unwritten memory.

The caching allocator is off. Each tensor then has its own allocation, and the sanitizer sees an access next to it.
"""

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...declaration.subject import SubjectSpec
from ...errors import UnavailableError
from ..bench.outcome import CaseStatus, Failure
from ..cases.case import Case
from ..cases.scope import Level, Scope
from ..properties.table import property_named
from .one_case import arguments_for

TOOLS = ("memcheck", "racecheck", "initcheck")
"""Tools for accesses out of bounds or misaligned, races in shared memory, and reads of unwritten memory."""
MOST_FINDINGS = 20
"""Findings of one run that are reported in full. All are counted."""
TIMEOUT_S = 600.0
CASES_OF_AN_OPERATION = 2
_PROPERTIES = ("out-of-bounds", "unwritten", "alignment")
_PREFIX = "========="
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ", re.MULTILINE)
_NOTICES = (
    "COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Program hit", "Target application",
    "Error: process",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of a tool. ``case`` is None if the error shows only when several cases run in a row."""

    tool: str
    case: Case | None
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class SanitizerReport:
    """Findings of all tools. ``executed`` counts the cases that computed something, once for each tool."""

    tools: tuple[str, ...]
    cases: tuple[Case, ...]
    executed: int
    findings: tuple[Finding, ...]
    seconds: float

    def text(self) -> str:
        """Return a line of counts, then the findings as readable text."""
        runs = len(self.cases) * len(self.tools)
        lines = [
            f"compute-sanitizer {', '.join(self.tools)}: {self.executed} of {runs} runs of cases, {self.seconds:.1f} s, "
            f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}"
        ]
        for finding in self.findings:
            lines += [f"  {finding.case.id if finding.case else 'several cases in a row'}", f"    {finding.failure.message}"]
        return "\n".join(lines)


def sanitize(
    spec: SubjectSpec, cases: Sequence[Case], device: str, *, tools: Sequence[str] = TOOLS, timeout_s: float = TIMEOUT_S
) -> SanitizerReport:
    """Run the cases in one process under each tool. If it finds something, run each case again in isolation to locate it.

    Raises UnavailableError if compute-sanitizer or a CUDA device is missing, or if the two do not work together.
    """
    if not device.startswith("cuda"):
        raise UnavailableError(f"sanitize: got device {device}, expected a CUDA device: compute-sanitizer checks only GPU code")
    program = _program()
    started, executed, findings = time.monotonic(), 0, list[Finding]()
    for tool in tools:
        count, messages = _run([program, "--tool", tool], spec, cases, device, timeout_s)
        executed += count
        found: list[tuple[Case | None, str]] = []
        for case in cases if messages and len(cases) > 1 else ():
            found += [(case, message) for message in _run([program, "--tool", tool], spec, [case], device, timeout_s)[1]]
        found = found or [(cases[0] if len(cases) == 1 else None, message) for message in messages]
        findings += [Finding(tool=tool, case=case, failure=Failure(property_name=tool, message=text)) for case, text in found]
    return SanitizerReport(
        tools=tuple(tools), cases=tuple(cases), executed=executed, findings=tuple(findings), seconds=time.monotonic() - started
    )


def few_cases(scope: Scope) -> list[Case]:
    """Return some cases of each operation, at sizes and addresses where kernels go wrong. Few, because a sanitizer is slow."""
    smoke = dataclasses.replace(scope, level=Level.SMOKE)
    kept: list[Case] = []
    for wanted in map(property_named, _PROPERTIES):
        cases = list(wanted.cases(smoke)) if wanted.needs(smoke) is None else []
        for op in smoke.tested_ops:
            kept += [case for case in cases if case.op == op][:CASES_OF_AN_OPERATION]
    return kept


@functools.cache
def _program() -> str:
    """Return the path of compute-sanitizer. Raises UnavailableError if it is missing."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        from torch.utils.cpp_extension import CUDA_HOME  # noqa: PLC0415 - slow to import, knows where CUDA is

        home = Path(CUDA_HOME or "")
        folders = (home / "bin", home / "compute-sanitizer") if CUDA_HOME else ()
        found = next((path for folder in folders if (path := shutil.which("compute-sanitizer", path=str(folder)))), None)
    if found is None:
        raise UnavailableError(
            "sanitize: there is no compute-sanitizer on PATH or in CUDA_HOME; install the one of the CUDA toolkit (cuda-sanitizer)"
        )
    return found


def _run(
    sanitizer: Sequence[str], spec: SubjectSpec, cases: Sequence[Case], device: str, timeout_s: float
) -> tuple[int, list[str]]:
    """Run cases under a tool. Return how many computed something, and the texts of the errors that it found."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-sanitize-") as folder:
        log = Path(folder) / "log"
        path = os.pathsep.join(str(entry) or os.getcwd() for entry in sys.path)
        command = [
            "env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", f"PYTHONPATH={path}",
            *sanitizer, "--log-file", str(log), "--print-limit", str(MOST_FINDINGS), "--show-backtrace", "no",
            "--report-api-errors", "no",
            sys.executable, "-m", f"{__package__}.one_case", *arguments_for(spec, cases, device),
        ]  # fmt: skip
        printed, complaints = _completed(command, timeout_s)
        report = log.read_text(errors="replace") if log.exists() else ""
    statuses = [CaseStatus(json.loads(line)["verdict"]) for line in printed.splitlines() if line.startswith("{")]
    executed = sum(status not in (CaseStatus.REFUSED, CaseStatus.RAISED) for status in statuses)
    counts = [int(count) for count in _SUMMARY.findall(report)]
    if not counts or not statuses:
        end = " | ".join(" ".join((report + "\n" + printed + "\n" + complaints).split("\n")).split(_PREFIX)[-4:])
        raise UnavailableError(f"sanitize: {' '.join(sanitizer)} did not run the cases: {' '.join(end.split())[-600:]}")
    return executed, (_messages(report) or [f"{sum(counts)} errors"]) if any(counts) else []


def _completed(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Run a command and return its (stdout, stderr). Raises UnavailableError after ``timeout_s`` and kills its process group."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"sanitize: no end after {timeout_s:g} s, expected one; run fewer cases or tools") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def _messages(report: str) -> list[str]:
    """Return one line for each error block of a report: its first line and the lines indented below it."""
    blocks: list[list[str]] = []
    for line in report.splitlines():
        text = line.removeprefix(_PREFIX)
        if text.startswith("  ") and blocks:
            blocks[-1].append(text.strip())
        elif text.strip():
            blocks.append([text.strip()])
    return [", ".join(block) for block in blocks if not block[0].startswith(_NOTICES)][:MOST_FINDINGS]
