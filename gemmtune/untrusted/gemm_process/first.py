"""First process: it imports torch, and forks another one for each GEMM."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from _thread import start_new_thread
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .program import serve
from .wires import anonymous

PARENT_CHECK_S = 1.0
ENDING_S = 4.0
PR_SET_CHILD_SUBREAPER, PR_CAPBSET_DROP = 36, 24
CAP_VERSION, CAP_SYS_NICE = 0x20080522, 23
"""Version of the words of ``capset``, and the number of the right to raise priorities."""
RLIMIT_NICE = 13
"""Number of the limit of priorities, which Python does not name."""


def _begin(request: Mapping[str, Any], fds: Sequence[int], control: socket.socket, parent: int) -> int | None:
    """Become the process of one GEMM, with nothing of the first process but its modules. Return its status, if it has one."""
    pipe, memory, output = fds
    control.close()
    os.setsid()
    _cannot_raise()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the GEMM starts stays among its descendants
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["environment"]["PWD"])
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory ends, the system ends the GEMM and not its judge
    if script := request["script"]:
        sys.argv[:], sys.orig_argv[:] = [script], [sys.executable, script]
        sys.modules["__main__"].__file__ = script
    sys.path[:] = request["path"]
    start_new_thread(_end_with, (parent,))
    return serve(pipe, memory)


def _cannot_raise() -> None:
    """Give up the right to raise a priority. Nothing would show that, once it is put back before the answer."""
    for limit in (RLIMIT_NICE, resource.RLIMIT_RTPRIO):
        resource.setrlimit(limit, (0, 0))
    libc, header, words = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(CAP_VERSION), (ctypes.c_uint32 * 6)()
    libc.prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)
    libc.capget(header, words)
    for number in range(3):
        words[number] &= ~(1 << CAP_SYS_NICE)
    libc.capset(header, words)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    _end_children()
    os.killpg(0, signal.SIGKILL)


def _children() -> list[int]:
    """Return the processes whose parent is this one, those of ended children included."""
    own, found = str(os.getpid()), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[1] == own:
                found.append(int(name))
    return found


def _end_children(spared: Collection[int] = ()) -> None:
    """Kill the children of this process but the spared ones, and theirs, which become its own when their parents end."""
    deadline = time.monotonic() + ENDING_S
    while (children := set(_children()) - set(spared)) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _status(pid: int) -> int | None:
    """Return how a fork ended, as the system has it. None while it runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found else None


def fork_on_request(control: socket.socket) -> None:
    """Fork a process for each request until the caller closes the socket or ends. Then remove the folders of these processes."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own, forks, homes = os.getpid(), set[int](), list[str]()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 2**16, 3)
        if not data:
            break
        request = json.loads(data)
        known = {"number": request.get("number")}  # the caller may have given up an earlier one
        if request["do"] == "status":
            status = _status(request["pid"])
            if status is not None:
                forks.discard(request["pid"])
                _end_children(forks)
            control.send(json.dumps(known | {"status": status}).encode())
            continue
        homes.append(request["environment"]["HOME"])
        pid = os.fork()
        if not pid:
            status, code = None, 0
            try:
                status = _begin(request, fds, control, own)
            except BaseException:  # noqa: BLE001 - such as SystemExit of the GEMM; the end of its output is reported
                traceback.print_exc()
                code = 1
            finally:
                sys.stderr.flush()
                if status is None:
                    os._exit(code)
            raise SystemExit(status)  # as a program ends, with what is to run then
        forks.add(pid)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps(known | {"pid": pid}).encode())
    _end_children()
    for folder in homes:
        shutil.rmtree(folder, ignore_errors=True)


def nameless() -> Callable[[], None]:
    """Return ``main`` after the code of this package has lost its names."""
    anonymous([module for name, module in sys.modules.items() if name.partition(".")[0] == __package__])
    return main


def main() -> None:
    """Serve the socket that the first argument names. No import leads to the modules of this package any longer."""
    server = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = sys.orig_argv[:] = [""]
    hidden = [sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == __package__]
    vars(sys.modules["__main__"]).pop("nameless", None)
    folder = os.environ["TMPDIR"]
    server.send(b"ready")
    fork_on_request(server)
    shutil.rmtree(folder, ignore_errors=True)
    hidden.clear()
    os._exit(0)
