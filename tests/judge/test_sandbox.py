"""The sandbox of an untrusted GEMM: a stand-in for bubblewrap, and the real one where it may run."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from hack_table import HONEST

from gemmtune.judging.targets import target_of
from gemmtune.judging.verdict import Standing, judge
from gemmtune.untrusted.candidate import Candidate
from gemmtune.untrusted.process import end_first


def test_sandbox_needs_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [verdict] = judge(f"{HONEST}:by_numpy", device="cpu", level="brief", sandbox=True).verdicts
    assert verdict.standing is Standing.NOT_JUDGED
    assert "install it (apt install bubblewrap)" in verdict.reason


@pytest.mark.turn(3, 4)
@pytest.mark.usefixtures("one_shape")
def test_sandbox_wraps_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for bubblewrap notes its options and runs the command."""
    stand_in = tmp_path / "bwrap"
    stand_in.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/options\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    [verdict] = judge(f"{HONEST}:by_numpy", device="cpu", level="brief", sandbox=True).verdicts
    end_first(gpu=False, sandbox=True)
    assert verdict.standing is Standing.RIGHT, verdict.reason
    options = (tmp_path / "options").read_text()
    for word in ("--ro-bind / /", "--unshare-all", "--die-with-parent", "--bind"):
        assert word in options


def test_sandbox_says_why_it_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bwrap"
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("gemmtune.untrusted.process._firsts", {})
    [verdict] = judge(f"{HONEST}:by_numpy", device="cpu", level="brief", sandbox=True).verdicts
    assert verdict.standing is Standing.NOT_JUDGED
    assert "No permissions to create new namespace. It needs namespaces of its own: let users make them" in verdict.reason


BOXED = """
import os, socket, torch

def outcome(work):
    try:
        work()
        return 1.0
    except OSError:
        return 0.0

def connects(port):
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        pass

def writes(path):
    with open(path, "w") as file:
        file.write("x")

def probes(a, b):
    port, parent, here = (int(x) for x in a[0])
    return torch.tensor([
        outcome(lambda: connects(port)), outcome(lambda: writes(f"{FOLDER!r}/left")), outcome(lambda: writes("/tmp/left")),
        outcome(lambda: os.kill(parent, 0)), float(str(here) in os.listdir("/proc")), outcome(lambda: writes("own.txt")),
    ])
"""


@pytest.mark.slow
def test_sandbox_has_no_network_no_other_processes_and_files_that_cannot_be_written(tmp_path: Path) -> None:
    """The real bubblewrap, where it is installed and may make namespaces."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--", "true"], capture_output=True).returncode:
        pytest.skip("bubblewrap may not make namespaces here")
    folder = Path(__file__).parent
    path = tmp_path / "boxed.py"
    path.write_text(BOXED.replace("{FOLDER!r}", str(folder)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = torch.tensor([[server.getsockname()[1], os.getpid(), os.getpid()]], dtype=torch.float64)
        for sandbox, found in ((False, [1, 1, 1, 1, 1, 1]), (True, [0, 0, 0, 0, 0, 1])):
            candidate = Candidate(target_of(f"{path}:probes"), sandbox=sandbox)
            assert candidate.call("", (given, given), {}).tolist() == found
            candidate.close()
            assert (folder / "left").exists() is not sandbox
            (folder / "left").unlink(missing_ok=True)
            Path("/tmp/left").unlink(missing_ok=True)
