"""Record of what a GEMM does besides computing, from hooks that Python code cannot remove."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

MOST_EVENTS = 100
"""Largest number of events in one answer."""
SECRETS = re.compile(r"/proc/(?:self|thread-self|\d+)/(?:task/\d+/)?(?:mem|maps|smaps|numa_maps|environ|cmdline|fd)\b")
"""Files that show the memory and the arguments of processes."""
PROCESSES = re.compile(r"/proc(?:/\d+)?/?$")
"""Folders that show which processes there are."""
OF_OTHERS = frozenset({
    "kill", "killpg", "tgkill", "tkill", "ptrace", "process_vm_readv", "process_vm_writev", "setpriority", "sched_setaffinity",
    "prlimit", "prlimit64",
})  # fmt: skip
"""Functions of C that reach other processes."""
FORKS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "os.exec")
SNIFFS = (
    "gc.get_objects",
    "gc.get_referrers",
    "gc.get_referents",
    "sys._getframe",
    "sys._current_frames",
    "sys.settrace",
    "sys.setprofile",
)
CODE = (".py", ".pth", ".so", ".json", ".toml")
"""Ends of the names of files that change what packages do."""
SIGHTS = ("inspect.py", "traceback.py")
"""Modules of Python through which a stack is read."""
_FRAME = sys._getframe


def _is_secret(path: str) -> bool:
    """Return True for a file that shows this process's memory, or anything of another process."""
    of_another = path.startswith("/proc/") and path[6:7].isdigit() and not path.startswith(f"/proc/{os.getpid()}/")
    return of_another or SECRETS.match(path) is not None


class Journal:
    """Events of a GEMM's process, each once."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._events: list[tuple[str, str]] = []
        self._roots = tuple(roots)
        self._seen: set[tuple[str, str]] = set()
        self._installed = tuple(os.path.join(os.path.abspath(entry), "") for entry in sys.path if os.path.isdir(entry))
        self._looking = False
        sys.addaudithook(self._hook)

    def taken(self) -> list[tuple[str, str]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def note(self, what: str, detail: str) -> None:
        """Add an event once."""
        if (what, detail) not in self._seen and len(self._seen) < MOST_EVENTS:
            self._seen.add((what, detail))
            self._events.append((what, detail))

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._looking:  # looking at frames is audited too
            return
        self._looking = True
        try:
            self._look(event, args)
        finally:
            self._looking = False

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path, flags = os.fsdecode(args[0]), args[2] if isinstance(args[2], int) else 0
            if self._is_own() and _is_secret(real := os.path.realpath(path)):
                self.note("looks", real)
            elif flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and path != os.devnull:
                self._wrote(os.path.abspath(path))
        elif event in SNIFFS and self._is_own():
            self.note("looks", event)
        elif event in ("os.listdir", "os.scandir") and isinstance(args[0], str | bytes) and self._is_own():
            if PROCESSES.match(path := os.path.realpath(os.fsdecode(args[0]))):
                self.note("looks", path)
        elif event == "ctypes.dlsym" and args[1] in OF_OTHERS:
            self.note("reaches", f"{args[1]} of C")
        elif event == "object.__setattr__" and args[1] in ("__code__", "__globals__", "__closure__"):
            self.note("replaces", f"{args[1]} of {getattr(args[0], '__qualname__', type(args[0]).__name__)}")
        elif event.startswith(FORKS):
            self.note("starts", event)
        elif event in ("socket.connect", "os.kill"):
            self.note("reaches", f"{event} {args[1:] if event == 'socket.connect' else args}")

    def _wrote(self, path: str) -> None:
        """Note a file that is written, unless it lies in the folder for temporary files of this process."""
        if path.endswith(CODE) and path.startswith(self._installed) and "__pycache__" not in path:
            self.note("reaches", f"{path}, a file of a package")
        elif not path.startswith(os.getcwd()):
            self.note("writes", path)

    def _is_own(self) -> bool:
        """Return True if the GEMM's own code makes the call that is audited, directly or by a module that reads stacks."""
        frame: Any = _FRAME(3)
        while frame is not None and frame.f_code.co_filename.endswith(SIGHTS):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(self._roots)
