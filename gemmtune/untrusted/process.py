"""Processes for untrusted GEMMs: one that imports torch once, and a fork of it for each GEMM."""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UnavailableError
from ..settings import child_environment
from ..timing.cores import clock_s, parent_of, started_by, tree
from ..workers.pipe import Pipe
from ..workers.worker import START_TIMEOUT_S
from . import folders
from .sandbox import names_of, sandboxed, why_not_started
from .standing import Of, Standings

START = "import sys; sys.path.insert(0, sys.argv.pop()); from gemm_process.first import nameless; del sys.path[0]; nameless()()"
"""Program of the first process, which imports the package of that name and nothing else of ours."""
QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "OPENBLAS_THREAD_TIMEOUT": "4",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment in which threads that have nothing to do sleep at once, so that work between calls shows."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
ENDING_S = 5.0
TAIL_BYTES = 2000


class First:
    """Process that imports torch, and forks. ``gpu`` is False where it sees none."""

    def __init__(self, *, gpu: bool, sandbox: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self._owner = os.getpid()
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-c", START, str(theirs.fileno()), str(Path(__file__).parent)]
        command = sandboxed(command, self.folder, gpu=gpu) if sandbox else command
        changes = QUIET | ({} if gpu else NO_GPU) | {"TMPDIR": str(self.folder), "HOME": str(self.folder)}
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - read below
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                pass_fds=(theirs.fileno(),), start_new_session=True, env=child_environment(changes),
            )  # fmt: skip
        self._sandbox = sandbox
        self._control = own
        self._standings, self._changed = Standings(), list[tuple[Of, Of]]()
        self._lock, self._number = threading.Lock(), 0
        self.forks: set[int] = set()  # ended ones too
        self._homes: list[Path] = []
        with errors:
            if not self._is_ready():
                self.close()
                raise UnavailableError(why_not_started(_tail(errors.fileno()), sandbox=sandbox))
        self.changes()

    @property
    def alive(self) -> bool:
        """True until the process ends, or in a fork of its parent."""
        return self._process.poll() is None and self._owner == os.getpid()

    def changes(self) -> list[tuple[Of, Of]]:
        """Return changes of its priority and cores, which its next forks would have, and undo them."""
        self._changed += self._standings.changes(self._process.pid)
        found, self._changed = self._changed, []
        return found

    def fork(self, fds: list[int], *, in_use: bool = False) -> tuple[int, Path]:
        """Return the process id and the home of a new fork, which gets these files: its pipe, its memory and its output.

        One ``in_use`` has nothing of ours in its environment, folders unlike those for temporary files, and seems to run a script.
        """
        self._changed = self.changes()  # undone, for whoever asks next
        here = os.getcwd()
        path = [entry or here for entry in sys.path]
        own = child_environment({})
        environment: dict[str, str | None] = {name: own.get(name) for name in QUIET} if in_use else {}
        environment |= self._folders() if in_use else folders.alone(self.folder)
        request = {"do": "fork", "environment": environment, "path": path if here in path else [here, *path]}
        request["script"] = str(Path(environment["PWD"] or here, "main.py")) if in_use else ""
        pid = int(self._asked(request, fds, START_TIMEOUT_S)["pid"])
        self.forks.add(pid := self._outer(pid) if self._sandbox else pid)
        return pid, Path(environment["HOME"] or here)

    def _folders(self) -> Mapping[str, str]:
        """Return the folders of a process in use. In a sandbox only those of ours can be written."""
        if not self._sandbox:
            with contextlib.suppress(OSError):
                found = folders.as_in_use()
                self._homes.append(Path(found["HOME"]))
                return found
        return folders.alone(self.folder)

    def status(self, pid: int) -> int | None:
        """Return how a fork ended, as ``os.wait`` has it, or None if it runs or has been asked for before."""
        with contextlib.suppress(OSError, ValueError):
            found = self._asked({"do": "status", "pid": self._inner(pid) if self._sandbox else pid}, [], ENDING_S)["status"]
            return None if found is None else int(found)
        return None

    def _asked(self, request: Mapping[str, object], fds: list[int], timeout_s: float) -> dict[str, Any]:
        """Send a request with files, and return its answer. One that came too late for an earlier request is dropped."""
        with self._lock:
            self._number += 1
            socket.send_fds(self._control, [json.dumps({**request, "number": self._number}).encode()], fds)
            while (answer := json.loads(self._said(timeout_s)))["number"] != self._number:
                pass
        return dict(answer)

    def close(self) -> None:
        """End the process with its forks."""
        if self._owner != os.getpid():
            return
        self._control.close()  # it then ends what it has started, and itself
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            _kill_all(self._process.pid)
            self._process.wait()
        for folder in (*self._homes, self.folder):
            folders.emptied(folder)

    def _is_ready(self) -> bool:
        try:
            return self._said(START_TIMEOUT_S) == b"ready"
        except OSError:
            return False

    def _said(self, timeout_s: float) -> bytes:
        self._control.settimeout(timeout_s)
        return self._control.recv(2**16)

    def _outer(self, inner: int) -> int:
        """Return the process id of a fork that has another one in its sandbox."""
        if (found := next((x for x in tree(self._process.pid) if names_of(x)[-1:] == [inner]), None)) is not None:
            return found
        raise UnavailableError(f"sandbox: got no process {inner} among those of the sandbox")

    @staticmethod
    def _inner(outer: int) -> int:
        return (names_of(outer) or [outer])[-1]


def _tail(file: int) -> str:
    """Return the end of what has been written to a file."""
    return os.pread(file, TAIL_BYTES, max(0, os.fstat(file).st_size - TAIL_BYTES)).decode(errors="replace").strip()


_firsts: dict[tuple[bool, bool], First] = {}
_starting = threading.Lock()


def first(*, gpu: bool, sandbox: bool) -> First:
    """Return the first process, started once."""
    with _starting:
        known = _firsts.get((gpu, sandbox))
        if known is None or not known.alive:
            known = _firsts[gpu, sandbox] = First(gpu=gpu, sandbox=sandbox)
        return known


def changes_of_first(*, gpu: bool, sandbox: bool) -> list[tuple[Of, Of]]:
    """Return the changes of the first process that nobody has asked for."""
    known = _firsts.get((gpu, sandbox))
    return known.changes() if known is not None and known.alive else []


def end_first(*, gpu: bool, sandbox: bool) -> None:
    """End the first process with all of its forks, those of torch too. The next fork comes from a new one."""
    if (known := _firsts.pop((gpu, sandbox), None)) is not None:
        known.close()


def close_all() -> None:
    """End all processes for untrusted code now."""
    while _firsts:
        _firsts.popitem()[1].close()


atexit.register(close_all)


class Fork:
    """Process of one GEMM, with its pipe and its output."""

    def __init__(self, memory: int, *, gpu: bool, sandbox: bool, in_use: bool = False) -> None:
        self._first = first(gpu=gpu, sandbox=sandbox)
        own, theirs = socket.socketpair()
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        with theirs:
            self.pid, self.home = self._first.fork([theirs.fileno(), memory, self.output.fileno()], in_use=in_use)
        self._pidfd = os.pidfd_open(self.pid)
        self._parent = parent_of(self.pid)
        self._standings = Standings()
        self._standings.changes(self.pid)
        self._end = own
        self.pipe = Pipe(own, self.ended)

    def changes(self) -> list[tuple[Of, Of]]:
        """Return changes of the priorities and cores of its threads, or of its parent, since the last call. Undo them."""
        return self._standings.changes(self.pid) + self._first.changes()

    def answers(self, timeout_s: float) -> bool:
        """Wait until the process has sent something or has ended, and return False after ``timeout_s``."""
        return bool(select.select([self._end.fileno(), self._pidfd], [], [], timeout_s)[0])

    def ended(self) -> bool:
        """Return True once the process has ended."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def pending(self) -> bool:
        """Return True if it has sent something that nobody asked for."""
        if not select.select([self._end], [], [], 0)[0]:
            return False
        with contextlib.suppress(ConnectionError):
            return bool(self._end.recv(1, socket.MSG_PEEK)) and not self.ended()  # nothing if it is about to end
        return False

    def cpu_s(self) -> float:
        """Return the CPU time of all threads of the process, or 0 if it has ended."""
        return clock_s(self.pid)

    def descendants_s(self) -> float:
        """Return the CPU time of what the process has started."""
        return sum(seconds for pid, seconds in tree(self.pid).items() if pid != self.pid) + sum(map(clock_s, self._given_up()))

    def started_s(self) -> float:
        """Return the CPU time of what the process has started and still lives, exactly."""
        return sum(map(clock_s, [*started_by(self.pid), *self._given_up()]))

    def _given_up(self) -> list[int]:
        """Return what a fork has started and given up, so that it became the child of the first process."""
        return started_by(self._parent, self._first.forks) if self._parent else []

    def resident_bytes(self) -> int:
        """Return the memory that the process holds for itself."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            words = Path(f"/proc/{self.pid}/statm").read_text(errors="replace").split()
            return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def threads(self) -> int:
        """Return the number of threads of the process."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.pid}/task"))
        return 0

    def status(self) -> int | None:
        """Return how the process ended, as ``os.wait`` has it, or None if it runs on or has been asked for before."""
        deadline, status = time.monotonic() + ENDING_S, None
        while status is None and time.monotonic() < deadline and self._first.alive:
            status = self._first.status(self.pid) if self.ended() else None
            time.sleep(0.002)
        return status

    def how_ended(self) -> str:
        """Return how the process ended, with the end of its output."""
        status = self.status()
        if status is None:
            how = "closed its pipe"
        elif os.WIFSIGNALED(status):
            how = f"died by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            how = f"exited with status {os.WEXITSTATUS(status)}"
        return how + (f"\nthe end of its output:\n{tail}" if (tail := _tail(self.output.fileno())) else "")

    def close(self) -> None:
        """End the process and all that it has started."""
        if not self.ended():
            _kill_all(self.pid)
        deadline = time.monotonic() + ENDING_S
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._first.status(self.pid)
        os.close(self._pidfd)
        self.pipe.close()
        self.output.close()


def _kill_all(root: int) -> None:
    """Kill the descendants of a process and then the process, so that none is inherited before it ends."""
    for pid in reversed([*tree(root)]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
