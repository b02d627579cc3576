"""Copies of the tree, and the forked processes that try mutants in them."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation.edits import Edit

__all__ = ["ROOT", "Job", "Mutant", "Trees", "finished"]

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
LEFT_OUT = (".git", "__pycache__", "*.egg-info", ".*cache", ".hypothesis")
"""Files that a copy of the tree does not need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """An edit of a file. ``path`` is relative to the tree, and ``diff`` has the changed lines."""

    path: Path
    edit: Edit
    diff: str

    @property
    def package(self) -> str:
        """Folder of the package that contains the file."""
        return self.path.parts[1]


Job = tuple[Mutant | None, list[str], bool]
"""A mutant or None, the tests to run, and whether all cases run instead of this commit's."""


class Trees:
    """Copies of the tree, one for each job. Forked processes try mutants in them, so that none imports torch again.

    A test that takes longer than the limit fails. The end of its context ends running processes, which Ctrl-C does not reach.
    """

    def __init__(self, root: Path, count: int, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self.running: dict[int, tuple[int, float, Path, str]] = {}
        self.free = [folder / f"tree{i}" for i in range(count)]
        for tree in self.free:
            shutil.copytree(root, tree, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)

    def __enter__(self) -> Trees:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            end(process)

    def start(self, tree: Path, job: Job, log: Path) -> int:
        """Run test files in a forked process. Return its id."""
        process = os.fork()
        if process:
            return process
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.freeze()  # keeps the parent's objects out of each run's garbage collections
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            status = self._tested(tree, *job)
        except BaseException as error:  # noqa: BLE001 - a forked process must never continue with the parent's code
            print(f"{type(error).__name__}: {error}")
            status = 3
        sys.stdout.flush()
        os._exit(status)

    def _tested(self, tree: Path, mutant: Mutant | None, tests: Sequence[str], all_cases: bool) -> int:
        os.chdir(tree)
        sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "tests"))]
        for name, module in list(sys.modules.items()):  # modules that the script itself has imported
            file = Path(getattr(module, "__file__", None) or "/")
            if file.is_relative_to(ROOT) and "site-packages" not in file.parts:  # an environment may lie in the repository
                del sys.modules[name]
        os.environ["PYTHONPATH"] = str(tree)
        os.environ.setdefault("GEMMTUNE_CACHE_DIR", str(self._folder / "kernels"))
        if all_cases:
            os.environ["TEST_ROTATION"] = "all"
        # Leave no compiled module for the next mutant, whose file may have the same time and size.
        sys.dont_write_bytecode = mutant is not None
        if mutant is not None:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            for compiled in (tree / mutant.path.parent).glob(f"__pycache__/{mutant.path.stem}.*"):
                compiled.unlink()
        import pytest

        options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", f"--timeout={self._limit_s}"]
        return int(pytest.main([*options, *tests]))


def finished(trees: Trees, work: Sequence[Job], limit_s: float, folder: str) -> Iterator[tuple[int, int | None, float, str]]:
    """Yield (number, exit status or None after the time limit, seconds, output) of each job when it ends."""
    waiting = list(enumerate(work))[::-1]
    running = trees.running
    while waiting or running:
        while waiting and trees.free:
            number, job = waiting.pop()
            mutant = job[0]
            tree, before = trees.free.pop(), ""
            if mutant is not None:
                before = (tree / mutant.path).read_text()
                (tree / mutant.path).write_text(mutant.edit.applied(before))
            process = trees.start(tree, job, Path(folder) / f"{number}.log")
            running[process] = (number, time.monotonic(), tree, before)
        for process, (number, begun, tree, before) in list(running.items()):
            seconds = time.monotonic() - begun
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and seconds < limit_s:
                continue
            end(process)
            if not ended:
                os.waitpid(process, 0)
            del running[process]
            mutant = work[number][0]
            if mutant is not None:
                (tree / mutant.path).write_text(before)
            trees.free.append(tree)
            log = Path(folder) / f"{number}.log"
            yield number, os.waitstatus_to_exitcode(status) if ended else None, seconds, log.read_text(errors="replace")
        time.sleep(POLL_S)


def end(process: int) -> None:
    """End a forked process, together with processes that a test has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
