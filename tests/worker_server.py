"""Server that forks the worker processes of the tests. It has imported torch, which takes most of a worker's start.

Each process that runs tests starts such a server when it first needs a worker. A worker gets the environment, folder and
``sys.path`` of a normal start. ``tests/unit/test_worker.py`` starts its workers as users do. The server forks twice. The worker
becomes a child of the requesting process, which thus learns of its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

__all__ = ["ForkedProcess", "Server", "measured_devices", "popen_of", "serve", "shorten_rounds"]

PR_SET_CHILD_SUBREAPER = 36
START_TIMEOUT_S = 180.0
ADOPTION_S = 30.0
FOLDER = Path(__file__).parent
PROGRAM = "import sys; sys.path[:] = sys.argv[4:]; import worker_server; worker_server.serve(*sys.argv[1:4])"
CPU_ROUNDS = 0.1
"""Factor on the duration of rounds on a CPU, instead of the larger one of ``gemmtune.effort``."""
MOST_SETS = 16
"""Limit on the sets of operands that a measurement uses in turn. Copies of 256 small ones took most of a tuning."""
FREE_NUMBER = 500
"""First file descriptor of the server, above those of a worker."""


class ForkedProcess:
    """Replacement for ``subprocess.Popen`` of a worker."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for the end and return the exit status, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class Server:
    """Server of this process, started by the first request. Its forks begin with ``imported``, a module that imports torch."""

    def __init__(self, imported: str = "gemmtune.selector.session") -> None:
        self._imported = imported
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def fork(self, code: str, files: dict[int, int]) -> ForkedProcess:
        """Return a new process that runs ``code``, with these files under these numbers."""
        job = {"code": code, "parent": os.getpid(), "folder": os.getcwd(), "environment": dict(os.environ), "numbers": list(files)}
        with self._lock, _adopting():
            connection = self._started()
            connection.sendall(len(text := json.dumps(job).encode()).to_bytes(4, "big"))
            socket.send_fds(connection, [text[:1]], list(files.values()))
            connection.sendall(text[1:])
            return ForkedProcess(int.from_bytes(_exactly(connection, 4), "big"))

    def _started(self) -> socket.socket:
        if self._connection is None:
            self._connection, other = socket.socketpair()
            self._connection.settimeout(START_TIMEOUT_S)
            with other:
                arguments = [str(other.fileno()), self._imported, measured_devices(), str(FOLDER), *sys.path]
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *arguments],
                    pass_fds=(other.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        return self._connection

    def forget(self) -> None:
        """Drop the connection, and so end an unshared server. A fork of this process would not be the parent of new workers."""
        if self._connection is not None:
            self._connection.close()
        self.__init__(self._imported)  # type: ignore[misc]


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Adopt orphaned descendants of this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def popen_of(server: Server) -> Any:
    """Return a replacement for the module ``subprocess`` where workers are started."""

    def popen(command: Sequence[str], *, stdin: int, stdout: Any, stderr: Any, pass_fds: Sequence[int], **_: object) -> Any:
        assert list(command[:3]) == [sys.executable, "-P", "-c"]
        with open(os.devnull, "rb") as nothing:
            files = {0: nothing.fileno(), 1: stdout.fileno(), 2: stderr.fileno()}
            return server.fork(command[3], files | {number: number for number in pass_fds})

    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data


def measured_devices() -> str:
    """Return "gpu" where the tests can use one, else "cpu"."""
    return "gpu" if importlib.import_module("torch").cuda.is_available() else "cpu"


def shorten_rounds(devices: str) -> None:
    """Shorten the final rounds of choices that differ little, on CPUs with fewer operands: no test needs their order."""
    rotation: Any = importlib.import_module("gemmtune.timing.rotation")
    if devices == "cpu" and not hasattr(rotation.set_count, "__wrapped__"):
        counted = rotation.set_count
        rotation.set_count = functools.wraps(counted)(lambda *sizes: min(counted(*sizes), MOST_SETS))
    importlib.import_module("gemmtune.effort")
    for name in ("gemmtune.effort", "gemmtune.selector.session", "gemmtune.selector.candidates"):
        module: Any = sys.modules.get(name)
        if module is not None:
            module.CPU_ROUNDS = CPU_ROUNDS


def serve(number: str, imported: str, devices: str) -> None:
    """Import a module. Fork a worker for each request on the socket with that number, until it is closed.

    The server never asks for GPUs: CUDA starts in no fork of a process that has counted them.
    """
    gc.disable()
    module = importlib.import_module(imported)
    if module.__name__.startswith("gemmtune."):
        importlib.import_module("gemmtune").Problem  # noqa: B018 - the first use of a name imports the whole package
    gc.freeze()  # so that no fork looks through the modules, whose memory it would copy
    gc.enable()
    if imported.startswith("gemmtune."):
        shorten_rounds(devices)
    connection = socket.socket(fileno=os.dup2(int(number), FREE_NUMBER, inheritable=False))
    os.close(int(number))
    while True:
        try:
            size = int.from_bytes(_exactly(connection, 4), "big")
        except EOFError:
            return
        text, files, *_ = socket.recv_fds(connection, 1, 10)
        job = json.loads(text + _exactly(connection, size - 1))
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                os.setsid()  # callers may kill a worker's process group
                os.write(write_end, os.getpid().to_bytes(4, "big"))
                _work(job, files)
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(read_end, 4))
        for file in (*files, read_end, write_end):
            os.close(file)


def _work(job: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Set up a forked process like a started one, and run the code."""
    status = 1
    try:
        deadline = time.monotonic() + ADOPTION_S
        while os.getppid() != job["parent"] and time.monotonic() < deadline:
            time.sleep(0.001)
        moved = [os.dup2(file, FREE_NUMBER + 1 + i) for i, file in enumerate(files)]
        for file, number in zip(moved, job["numbers"], strict=True):
            os.dup2(file, number)
        for file in range(3, FREE_NUMBER + 1 + len(files)):
            if file not in job["numbers"]:
                with contextlib.suppress(OSError):
                    os.close(file)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        importlib.invalidate_caches()
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except Exception:  # noqa: BLE001 - printed, as an interpreter prints it
        traceback.print_exc()
    finally:
        os._exit(status)
