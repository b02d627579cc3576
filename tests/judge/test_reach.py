"""Processes, files and memory of untrusted GEMMs: what they leave, and what they cannot change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from gemmtune.judging.report import as_json, lines
from gemmtune.judging.targets import compiled, target_of
from gemmtune.judging.verdict import Standing, judge
from gemmtune.timing.cores import clock_s, started_by
from gemmtune.untrusted.between import Between
from gemmtune.untrusted.candidate import Candidate, CandidateEnded, RemoteError
from gemmtune.untrusted.conduct import Conduct, Record
from gemmtune.untrusted.memory import Memory
from gemmtune.untrusted.process import Fork, first
from gemmtune.untrusted.standing import Standings
from gemmtune.untrusted.words import received

KERNELS = """
import os, subprocess, sys, time
import torch

def respawns(a, b):
    if os.fork() == 0:
        end = time.time() + 60
        while time.time() < end:
            if os.fork():
                os._exit(0)
            os.setsid()
            time.sleep(0.0005)
        os._exit(0)
    return a @ b

def marks_its_folder(a, b):
    found = os.path.exists("mark")
    open("mark", "w").close()
    assert os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd()
    return torch.full((1,), float(found))

def compiles_for_long(a, b):
    spin = "import time; end = time.time() + 2.5\\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-S", "-c", spin])
    return a @ b

def sleeps(a, b):
    time.sleep(60)

def has_no_text(a, b):
    class Error(RuntimeError):
        def __str__(self):
            raise ValueError
    raise Error

def kills_its_child(a, b):
    child = subprocess.Popen(["sleep", "9"])
    child.kill()
    child.wait()
    return a @ b

def cannot_raise(a, b):
    words = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd"))]
    assert not any(int(word, 16) >> 23 & 1 for word in words)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)
    except PermissionError:
        return a @ b

def is_killed_once(a, b):
    killed = __file__ + ".killed"
    if not os.path.exists(killed):
        open(killed, "w").close()
        os.kill(os.getpid(), 9)
    return a @ b

def leaves_a_child(a, b):
    if os.fork() == 0:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        time.sleep(9)
    return a @ b

def narrow(a, b):
    return (a.half() @ b.half()).float()

narrow.gemm_traits = {"dtypes": ["float32"], "accumulate": {"float32": "float16"}, "calls_torch": True, "input_mode": "tf32"}

def untellable(a, b):
    return a @ b

untellable.gemm_traits = {"least": object()}
"""
OVERRUN = """
#include <cstdint>
extern "C" void matmul(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i <= m * n; i++) out[i] = 0;
}
"""
KEPT = """
#include <cstdint>
extern "C" void matmul(const float* a, const float* b, float* out, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m * n; i++) out[i] = out[i] > 0 ? out[i] : b[i];
}
"""
A, B = torch.eye(4), torch.ones(4, 4)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return str(path)


def soon(true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_processes_that_multiply_end_with_their_gemm(kernels: str) -> None:
    parent = first(gpu=False, sandbox=False)._process.pid
    before = children_of(parent)
    candidate = Candidate(target_of(f"{kernels}:respawns"))
    candidate.call("", (A, B), {})
    assert len(children_of(parent)) > len(before)
    candidate.close()
    assert children_of(parent) == before


def test_no_process_raises_its_priority(kernels: str) -> None:
    candidate = Candidate(target_of(f"{kernels}:cannot_raise"))
    assert torch.equal(candidate.call("", (A, B), {}), B)
    candidate.close()


def test_what_was_started_counts_in_each_pause(kernels: str) -> None:
    candidate = Candidate(target_of(f"{kernels}:leaves_a_child"))
    candidate.call("", (A, B), {})
    assert candidate.fork is not None
    fork = candidate.fork
    [child] = started_by(fork.pid)
    assert soon(lambda: clock_s(child) > 0.15)
    candidate.settle()
    assert [x for x in candidate.findings if x.kind is Conduct.BETWEEN]
    candidate.close()
    assert started_by(child) == []


def test_each_process_has_a_folder_of_its_own(kernels: str) -> None:
    for _ in range(2):
        candidate = Candidate(target_of(f"{kernels}:marks_its_folder"))
        assert candidate.call("", (A, B), {}).item() == 0
        assert candidate.call("", (A, B), {}).item() == 1
        candidate.close()


def test_what_one_gemm_did_to_others_is_not_the_next_ones_deed(kernels: str) -> None:
    """Neither if it did not tell, nor if the system forbids to put it back."""
    candidate = Candidate(target_of(f"{kernels}:marks_its_folder"))
    candidate.opened()
    parent = first(gpu=False, sandbox=False)._process.pid
    os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, parent) + 1)
    candidate.close()
    assert [x.kind for x in candidate.findings] == [Conduct.REACHES]
    (later := Candidate(target_of(f"{kernels}:marks_its_folder"))).opened()
    assert first(gpu=False, sandbox=False)._process.pid != parent
    later.close()
    assert not later.findings


def test_a_change_that_cannot_be_undone_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.untrusted.standing.restore", lambda before, thread: None)
    with subprocess.Popen(["sleep", "60"]) as other:
        standings = Standings()
        assert standings.changes(other.pid) == []
        os.setpriority(os.PRIO_PROCESS, other.pid, os.getpriority(os.PRIO_PROCESS, other.pid) + 1)
        assert [len(standings.changes(other.pid)) for _ in range(2)] == [1, 0]
        other.kill()


def test_being_killed_once_is_no_fault(kernels: str) -> None:
    """The system kills processes where memory ends."""
    candidate = Candidate(target_of(f"{kernels}:is_killed_once"))
    assert torch.equal(candidate.call("", (A, B), {}), B)
    assert not candidate.findings
    fork = candidate.fork
    assert fork is not None
    os.kill(fork.pid, signal.SIGKILL)
    assert soon(fork.ended)
    assert not fork.pending()
    candidate.call("", (A, B), {})
    assert [str(x) for x in candidate.findings] == [f"{Conduct.ENDED}: died by SIGKILL"]
    candidate.close()


class FakeFork:
    """Process whose CPU time is given, reading by reading."""

    pid = os.getpid()

    def __init__(self, *readings_s: float) -> None:
        self.cpu_s = iter(readings_s).__next__

    def started_s(self) -> float:
        return 0.0

    descendants_s = started_s

    def threads(self) -> int:
        return 0

    resident_bytes = threads


@pytest.mark.parametrize(
    ("readings_s", "noted"),
    [
        ((0.0, 1.0, 1.001, 1.5, 1.5), 0),  # asked, answered, at rest, watched
        ((0.0, 1.0, 1.001, 1.5, 1.6, 1.6, 1.6), 0),  # the end of other work
        ((0.0, 1.0, 1.001, 1.5, 1.6, 1.6, 1.7), 1),
        ((0.0, 1.0, 1.2, 1.5, 1.5), 1),
    ],
    ids=["quiet", "once", "twice", "between calls"],
)
def test_work_without_a_call_is_looked_at_twice(readings_s: tuple[float, ...], noted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.untrusted.between.WATCH_S", 0.0)
    fork, between = cast("Fork", FakeFork(*readings_s)), Between()
    between.begin()
    between.ask(fork)
    between.answer(fork)
    between.rest(fork)
    assert [kind for kind, _ in between.found(fork)] == [Conduct.BETWEEN] * noted
    between.begin()
    between.ask(cast("Fork", FakeFork(9.0)))  # a new process, whose start is no work
    assert between._idle_s < 0.5


@pytest.mark.slow
@pytest.mark.turn(2, 4)
def test_nothing_is_left_by_a_judge_that_is_killed(tmp_path: Path) -> None:
    program = (
        "from gemmtune.untrusted.candidate import TORCH, Candidate\n"
        "from gemmtune.untrusted.process import first\n"
        "Candidate(TORCH).opened()\n"
        "started = first(gpu=False, sandbox=False)\n"
        "print(started._process.pid, flush=True)\n"
        "input()\n"
    )
    given = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True, env=given) as judging:
        assert judging.stdout is not None
        pid = int(judging.stdout.readline())
        made = list(tmp_path.iterdir())
        assert made
        judging.send_signal(signal.SIGKILL)
    assert soon(lambda: not Path(f"/proc/{pid}").exists())
    assert not [path for path in made if path.exists()]


@pytest.mark.turn(3, 4)
def test_a_program_that_works_for_a_call_prolongs_its_limit(kernels: str) -> None:
    candidate = Candidate(target_of(f"{kernels}:compiles_for_long"), timeout_s=1.0)
    assert torch.equal(candidate.call("", (A, B), {}), B)
    candidate.close()
    candidate = Candidate(target_of(f"{kernels}:sleeps"), timeout_s=0.5)
    with pytest.raises(CandidateEnded, match="no answer within"):
        candidate.call("", (A, B), {})


def test_ends_of_own_children_are_nobodys_business(kernels: str) -> None:
    candidate = Candidate(target_of(f"{kernels}:kills_its_child"))
    candidate.call("", (A, B), {})
    assert not [finding for finding in candidate.findings if finding.dishonest]
    candidate.close()


def test_errors_without_text_and_declarations_without_form_are_errors(kernels: str) -> None:
    candidate = Candidate(target_of(f"{kernels}:has_no_text"))
    with pytest.raises(RemoteError, match=r"^Error$"):
        candidate.call("", (A, B), {})
    candidate.close()
    [verdict] = judge(f"{kernels}:untellable", device="cpu", level="brief").verdicts
    assert verdict.standing is Standing.NOT_JUDGED
    assert "expected three integers for M, N and K" in verdict.reason


@pytest.mark.usefixtures("one_shape")
def test_report_says_what_was_declared(kernels: str) -> None:
    judgement = judge(f"{kernels}:narrow", device="cpu", level="brief")
    text = next(line for line in lines(judgement) if line.startswith("  declared "))
    assert "accumulate={'float32': 'float16'}" in text
    assert "input_mode=tf32" in text
    assert as_json(judgement)["verdicts"][0]["declared"] in text


def test_library_that_writes_outside_of_its_result_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "overrun.cpp"
    path.write_text(OVERRUN)
    candidate = Candidate(compiled(target_of(f"{path}:matmul")))
    with pytest.raises(RemoteError, match=r"it wrote outside of its result of \(4, 4\)"):
        candidate.call("", (A, B), {})
    candidate.close()


def test_library_gets_the_memory_of_an_earlier_result_too(tmp_path: Path) -> None:
    """One that looks whether ``out`` holds the result already is asked with another one there."""
    path = tmp_path / "kept.cpp"
    path.write_text(KEPT)
    candidate = Candidate(compiled(target_of(f"{path}:matmul")))
    found = [candidate.call("", (A, B * x), {})[0, 0].item() for x in (1, 2, 3, 4)]
    assert found == [1, 1, 3, 3]
    candidate.close()


def test_changed_cores_of_a_process_are_found_and_set_back() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core")
    with subprocess.Popen(["sleep", "30"]) as process:
        standings = Standings()
        assert standings.changes(process.pid) == []
        os.sched_setaffinity(process.pid, {min(cores)})
        [(before, now)] = standings.changes(process.pid)
        assert set(before[1]) == cores
        assert now[1] == (min(cores),)
        assert os.sched_getaffinity(process.pid) == cores
        process.kill()


@pytest.mark.parametrize("size", [[2**62, 2**62], [2**40, 2**40], [1] * 5000, [-1], ["4"], {}], ids=str)
def test_results_of_impossible_sizes_are_no_tensors_of_them(size: object) -> None:
    found = received(Memory(torch.device("cpu")), {"dtype": "float32", "size": size, "type": "Tensor"}, 0, 2**20)
    assert not isinstance(found, torch.Tensor) or found.numel() == 0


def test_details_are_short_and_few() -> None:
    record = Record()
    for number in range(1000):
        record.note(Conduct.WRITES, f"{number}\x1b" + "x" * 10**5)
    [finding] = record.findings
    assert len(str(finding)) < 2000
    assert "\x1b" not in str(finding)
    assert "and 96 more" in str(finding)
