"""Events about other processes, the network, and functions of C that reach either."""

from __future__ import annotations

import builtins
import ctypes
import os
import re
from collections.abc import Callable
from types import FrameType
from typing import Any

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

SECRETS = re.compile(r"/proc/(?:self|thread-self|\d+)/(?:task/\d+/)?(?:mem|maps|smaps|numa_maps|environ|cmdline|fd)\b")
"""Files that show the memory and the arguments of processes."""
PROCESSES = re.compile(r"/proc(?:/\d+)?/?$")
"""Folders that show which processes there are."""
OF_OTHERS = frozenset({
    "kill", "killpg", "tgkill", "tkill", "ptrace", "process_vm_readv", "process_vm_writev", "setpriority", "sched_setaffinity",
    "sched_setscheduler", "prlimit", "prlimit64", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "syscall",
    "open", "open64", "openat", "openat64", "fopen", "fopen64", "dlsym", "dlvsym", "connect", "sendto", "sendmsg", "sched_setattr",
    "sigqueue", "sched_setparam", "creat", "creat64", "gethostbyname", "getaddrinfo",
})  # fmt: skip
"""Functions of C that reach other processes, the network, or files without an event. Underscores before a name do not count."""
OF_FRAMES = ("PyEval_GetFrame", "PyFrame_", "PyThreadState_Get", "PyInterpreterState_", "PyUnstable_GC_")
"""Begins of the names of functions of C that find frames and objects without an event."""
PRODUCTS = re.compile(r"gemm|matmul|(?<![a-z])(bmm|mm|mv|gemv)(?![a-z])", re.IGNORECASE)
"""Names of functions of C that multiply matrices."""
LIBRARIES = re.compile(r"(^|/)lib(torch|c10|caffe2|aten)[^/]*\.so")
"""Libraries of torch."""
CONNECTING = {f"socket.{name}": 1 for name in ("connect", "sendto", "sendmsg", "bind")} | {
    f"socket.{name}": 0 for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo")
}
"""Events of sockets, with the place of the address among their arguments."""
FORKS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "os.exec", "pty.spawn"})

Note = Callable[[str, str], None]
Frame = FrameType | None
Handler = Callable[[tuple[Any, ...], Frame], None]


def paths() -> tuple[Callable[[Any], str], Callable[[str], bool], Callable[[int], bool]]:
    """Return functions that follow a path, tell files of other processes, and tell what this one has started from others."""
    opened, close, readlink, fsdecode, exists, process = os.open, os.close, os.readlink, os.fsdecode, os.path.exists, os.getpid()
    path_only, secrets, processes = os.O_PATH | os.O_CLOEXEC, SECRETS.match, PROCESSES.match

    def resolved(path: Any) -> str:
        try:
            fd = path if isinstance(path, int) else opened(path, path_only)
        except (OSError, ValueError):
            return fsdecode(path)
        try:
            return readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return str(path)
        finally:
            if fd is not path:
                close(fd)

    def is_hidden(path: str) -> bool:
        of_another = path[:6] == "/proc/" and path[6:7].isdigit() and not path.startswith(f"/proc/{process}/")
        return of_another or secrets(path) is not None or processes(path) is not None

    def is_own(pid: int) -> bool:
        if exists(f"/proc/self/task/{pid}"):
            return True
        while pid > 1 and pid != process:
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    pid = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return False
        return pid == process

    return resolved, is_hidden, is_own


def of_processes(note: Note) -> dict[str, Handler]:
    """Return the handlers of events about other processes."""
    of_others, of_frames, is_own, library = OF_OTHERS, OF_FRAMES, paths()[2], ctypes.CDLL
    products, of_torch = PRODUCTS.search, LIBRARIES.search
    folder, fsdecode = os.path.join(os.getcwd(), ""), os.fsdecode

    def looks_up(args: tuple[Any, ...], _frame: Frame) -> None:
        name = args[1].lstrip("_") if isinstance(args[1], str) else ""
        if name in of_others:
            note("reaches", f"{args[1]} of C")
        elif name.startswith(of_frames):
            note("looks", f"{args[1]} of C")
        elif products(name) and of_torch(str(vars(args[0]).get("_name") if isinstance(args[0], library) else "")):
            note("torch", f"{args[1]} of torch's own libraries")

    def reaching(event: str) -> Handler:
        def reaches(args: tuple[Any, ...], _frame: Frame) -> None:
            if args[0] and not is_own(args[0]):
                note("reaches", f"{event} {args}")

        return reaches

    def connecting(event: str, place: int) -> Handler:
        def connects(args: tuple[Any, ...], _frame: Frame) -> None:
            address = args[place]
            if address is not None and not (isinstance(address, (str, bytes)) and fsdecode(address).startswith(folder)):
                note("reaches", f"{event} {address}")

        return connects

    handlers: dict[str, Handler] = {"ctypes.dlsym": looks_up, "ctypes.dlsym/handle": looks_up}
    handlers |= {event: reaching(event) for event in ("os.kill", "os.killpg", "resource.prlimit")}
    handlers |= {event: connecting(event, place) for event, place in CONNECTING.items()}
    return handlers | {event: _starting(event, note) for event in FORKS}


def _starting(event: str, note: Note) -> Handler:
    return lambda _args, _frame: note("starts", event)
