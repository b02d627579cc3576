"""Files, numbers and texts of any kind that users and other programs give: devices, links, long names, NaN, other encodings."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import gemmtune
from gemmtune.cli import run
from gemmtune.errors import GemmtuneError, StoreError
from gemmtune.integration.recording import Recording
from gemmtune.perf_gate.baselines import Baselines
from gemmtune.store.store import Store
from gemmtune.timing import cores

LONG = "a" * 5000
PR_SET_NAME = 15


def export(path: Path) -> None:
    Store.open(path.parent / "store.sqlite").export_file(path)


def record(path: Path) -> None:
    Recording().write(path)


def keep_baselines(path: Path) -> None:
    Baselines(path=path, device={}).write()


@pytest.mark.parametrize("write", [export, record, keep_baselines], ids=lambda x: x.__name__)
def test_a_pipe_or_link_is_written_to_and_stays(write: Callable[[Path], None], tmp_path: Path) -> None:
    pipe, link, real = (tmp_path / name for name in ("pipe", "link", "real"))
    os.mkfifo(pipe)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()))
    reader.start()
    write(pipe)
    reader.join(timeout=10)
    assert pipe.is_fifo()
    real.write_text("before")
    link.symlink_to(real)
    write(link)
    assert link.is_symlink()
    assert real.read_text() == texts[0]
    assert {path.name for path in tmp_path.iterdir() if "sqlite" not in path.name} == {"pipe", "link", "real"}


def test_a_pipe_is_no_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="expected a file"):
        Store.open(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", ""], "cannot be written|expected a writable file"),
        (["judge", LONG], "there is no module"),
        (["judge", f"{LONG}.py:mm"], "got no such file"),
        (["record", f"{LONG}.py"], "which is not a file|expected a script"),
        (["judge", "x.py:mm", "--timeout", "nan"], "nan is not"),
        (["judge", "x.py:mm", "--timeout", "inf"], "inf is not"),
        (["judge", "x.py:mm", "--timeout", "1e30"], "1e[+]?30 is not"),
        (["tune", "8x8x8", "--budget", "nan"], "nan is not"),
        (["store", "prune", "--older", "nan"], "nan is not"),
        (["store", "prune", "--older", "inf"], "inf is not"),
        (["store", "prune", "--older", "99999999"], "99999999.0 is not"),
    ],
)
def test_odd_words_are_refused_without_a_traceback(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) in (1, 2)
    printed = capsys.readouterr()
    assert re.search(said, printed.out + printed.err), printed.err[-300:]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_limit_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(GemmtuneError, match="timeout_s: got"):
        gemmtune.judge("os.path:join", device="cpu", level="brief", timeout_s=seconds)


def test_a_process_may_have_any_name() -> None:
    """Linux cuts a name after 15 bytes, perhaps within a character."""
    name = "ä".encode() * 8
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        time.sleep(20)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while Path(f"/proc/{child}/comm").read_bytes().strip() != name[:15] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child in cores.tree(os.getpid())
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.turn(7, 8)
def test_texts_have_an_encoding() -> None:
    """Whoever reads or writes a text by the locale's encoding fails in another one."""
    arguments = {"read_text": 0, "write_text": 1}
    found = []
    for path in sorted(Path(gemmtune.__file__).parent.rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)):
            given = {keyword.arg for keyword in call.keywords}
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            of_file = len(call.args) == arguments.get(name)
            of_pipe = name in ("run", "Popen", "check_output") and "text" in given
            if (of_file or of_pipe) and not given & {"encoding", "errors"}:
                found.append(f"{path.name}:{call.lineno} {name}")
    assert not found
