"""Programs that are run: output, failures, and a hang that ends with all children."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gemmtune.errors import UnavailableError
from gemmtune.toolchain import tool
from gemmtune.toolchain.tool import run_tool, version_text


def script(folder: Path, text: str) -> str:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_output_and_status(tmp_path: Path) -> None:
    done = run_tool([script(tmp_path, 'cat; echo "$1"; echo bad >&2; exit 3'), "given"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "given\n", "bad\n")
    with pytest.raises(OSError, match="missing"):
        run_tool([str(tmp_path / "missing")])


def test_children_end_with_a_tool_that_hangs(tmp_path: Path) -> None:
    """The child holds the output, for which ``subprocess.run`` waits after its time-out."""
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"/tool did not end within 0\.5 s"):
        run_tool([script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")], timeout_s=0.5)
    assert time.monotonic() - begun < 30
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 30
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert version_text(script(tmp_path, "echo one; echo two")) == "one\ntwo\n"
    with pytest.raises(UnavailableError, match="does not run: --version ended with 4"):
        version_text(script(tmp_path, "exit 4"))
    monkeypatch.setattr(tool, "VERSION_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match=r"does not run: .* did not end within 0\.2 s"):
        version_text(script(tmp_path, "sleep 60"))
