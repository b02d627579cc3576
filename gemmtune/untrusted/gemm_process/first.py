"""First process: it imports torch, and forks another one for each GEMM."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .program import serve

PARENT_CHECK_S = 1.0
PR_SET_CHILD_SUBREAPER = 36


def _begin(request: Mapping[str, Any], fds: Sequence[int], control: socket.socket, parent: int) -> None:
    """Become the process of one GEMM, with nothing of the first process but its modules."""
    pipe, memory, output = fds
    control.close()
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the GEMM starts stays among its descendants
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    serve(pipe, memory)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def _status(pid: int) -> int | None:
    """Return how a fork ended, as the system has it. None while it runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found else None


def fork_on_request(control: socket.socket) -> None:
    """Fork a process for each request until the caller closes the socket, then end the remaining ones."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own, forks = os.getpid(), set[int]()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 2**16, 3)
        if not data:
            break
        request = json.loads(data)
        if request["do"] == "status":
            status = _status(request["pid"])
            forks -= {request["pid"]} if status is not None else set()
            control.send(json.dumps({"status": status}).encode())
            continue
        pid = os.fork()
        if not pid:
            try:
                _begin(request, fds, control, own)
            finally:
                os._exit(0)
        forks.add(pid)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid}).encode())
    for pid in forks:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve the socket that the first argument names."""
    server = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = [""]
    server.send(b"ready")
    fork_on_request(server)
