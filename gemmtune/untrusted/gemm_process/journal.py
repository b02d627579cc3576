"""Record of what a GEMM does besides computing, from hooks that Python code cannot remove.

A hook finds all that it uses in variables of the functions that make it, and its builtins in a copy. A GEMM finds neither.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import sysconfig
import time
from _thread import get_ident
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from .reach import Frame, Handler, Note, of_processes, paths
from .wires import NO_NAME

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

MOST_EVENTS = 100
"""Largest number of events of one kind."""
MOST_CHARS = 300
"""Longest detail of an event."""
CHANGING = {"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)} | {
    f"os.{name}": (0,) for name in ("remove", "rmdir", "mkdir", "truncate", "chmod", "chown", "utime", "setxattr")
}
"""Events of files that are changed without being opened, with the places of their paths among the arguments."""
SYSTEM = ("/proc/sys/", "/sys/", "/proc/self/autogroup", "/dev/cpu_dma_latency")
"""Files and folders with settings of the machine, and the priority of a session."""
AT_START = (
    ".pth", "sitecustomize.py", "usercustomize.py", "conftest.py", "pytest.ini", "/.bashrc", "/.bash_profile", "/.profile",
    "/.zshrc", "/.zshenv", "/authorized_keys",
)  # fmt: skip
"""Ends of the names of files that Python, pytest or a shell reads when it starts."""
CACHES = re.compile(r"/torch_extensions/|/torchinductor_|/\.triton/")
"""Caches of torch and Triton. Other code of theirs waits for a lock, or runs what it finds there."""
SNIFFS = frozenset({
    "gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._getframe", "sys._current_frames", "sys._current_exceptions",
    "sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback",
})  # fmt: skip
"""Events of functions through which code finds or follows the objects of others."""
FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
"""Attributes that lead from an error or a generator to a stack."""
REPLACING = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__"})
CODE = (".py", ".pth", ".so", ".json", ".toml")
"""Ends of the names of files that change what packages do."""
TRACEBACK, LOGGING = "traceback.py", f"logging{os.sep}__init__.py"
SIGHTS = ("inspect.py", TRACEBACK, f"asyncio{os.sep}base_tasks.py", "_jit_internal.py")
"""Modules of Python and torch through which a stack is read."""
PACKAGES = ("site-packages", "dist-packages")
OLDER_S = 1.0
"""Seconds by which a time is older for certain: clocks of files are coarse, and floats round."""


def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of Python's own modules, and those of installed packages."""
    paths = {name: os.path.join(os.path.realpath(path), "") for name, path in sysconfig.get_paths().items() if path}
    packages = {paths[name] for name in ("purelib", "platlib")}
    packages |= {os.path.join(path, "") for path in sys.path if os.path.basename(path) in PACKAGES}
    return tuple({paths["stdlib"], os.path.join(os.path.dirname(os.__file__), "")}), tuple(packages)


def _record() -> tuple[Note, Callable[[], list[tuple[str, str]]]]:
    """Return a function that adds an event, and one that takes the events since its last call, each once."""
    events: list[tuple[str, str]] = []
    seen: dict[str, set[str]] = {}
    most_events, most_chars = MOST_EVENTS, MOST_CHARS

    def note(what: str, detail: str) -> None:
        details, detail = seen.setdefault(what, set()), detail[:most_chars]
        if detail not in details and len(details) < most_events:  # many events of one kind hide none of another
            details.add(detail)
            events.append((what, detail))

    def taken() -> list[tuple[str, str]]:
        found = events[:]
        events.clear()
        return found

    return note, taken


def _origins(roots: Sequence[str], trusted: tuple[str, ...]) -> tuple[Callable[[Frame], bool], Callable[[Frame, str], bool]]:
    """Return a function that is true for code of the GEMM, and one that is true if the GEMM reads stacks or objects by a function.

    All code but Python's own and that of packages is the GEMM's: its files, their helpers, and code made of text.
    """
    own_roots, builtin = tuple(roots), (*trusted, "<frozen ")
    frames, sights, traceback, logging = FRAMES, SIGHTS, TRACEBACK, LOGGING

    def of_gemm(frame: Frame) -> bool:
        if frame is None:
            return True
        name = frame.f_code.co_filename
        return name.startswith(own_roots) or not name.startswith(builtin)

    def sniffs(frame: Frame, word: str) -> bool:
        if frame is None or of_gemm(frame):
            return True
        name = frame.f_code.co_filename
        if name.endswith(logging) or (name.endswith(traceback) and word in frames):  # only their own functions may have frames
            return of_gemm(frame.f_back)
        if not name.endswith(sights):
            return word not in frame.f_code.co_names  # it was given the function, as a thread is
        while frame is not None and frame.f_code.co_filename.endswith(sights):
            frame = frame.f_back
        return of_gemm(frame)

    return of_gemm, sniffs


def _asker(of_gemm: Callable[[Frame], bool], stdlib: tuple[str, ...]) -> Callable[[Frame], bool]:
    """Return a function that is true if the GEMM is the first that is not of Python's own modules."""
    packages, own, whole = PACKAGES, NO_NAME, (*stdlib, "<frozen ")  # Python freezes some of its modules, such as os

    def asked_by_gemm(frame: Frame) -> bool:
        while frame is not None:
            name = frame.f_code.co_filename
            if name == own or not name.startswith(whole) or any(word in name for word in packages):
                break
            frame = frame.f_back
        return of_gemm(frame)

    return asked_by_gemm


def _writer(note: Note) -> Callable[[str], None]:
    """Return a function that notes a file that is written, unless it lies in the folder for temporary files of this process."""
    installed = tuple(os.path.join(os.path.abspath(entry), "") for entry in sys.path if os.path.isdir(entry))
    code, system, at_start, own = CODE, SYSTEM, AT_START, os.path.join(os.getcwd(), "")

    def wrote(path: str) -> None:
        if path.endswith(at_start):
            note("reaches", f"{path}, which Python, pytest or a shell reads when it starts")
        if f"{path}/".startswith(own):  # a nameless file has the name of its folder
            return
        if path.endswith(code) and path.startswith(installed) and "__pycache__" not in path:
            note("reaches", f"{path}, a file of a package")
        elif path.startswith(system):
            note("reaches", f"{path}, a setting of the system")
        else:
            note("writes", path)

    return wrote


def _above(roots: Sequence[str]) -> frozenset[str]:
    """Return the folders that hold that of this process, where others keep theirs, without those of modules and of the GEMM."""
    above = {str(x) for x in [*Path(os.getcwd()).parents][:-1]}
    return frozenset(above - {os.path.realpath(x) for x in (*sys.path, *map(os.path.dirname, roots))})


def _of_files(
    note: Note, asked_by_gemm: Callable[[Frame], bool], wrote: Callable[[str], None], above: Collection[str]
) -> dict[str, Handler]:
    """Return the handlers of events about files. Whoever lists the folders ``above`` looks for files of others."""
    resolved, is_hidden, _ = paths()
    abspath, fsdecode, devnull = os.path.abspath, os.fsdecode, os.devnull
    writing, of_others = os.O_WRONLY | os.O_RDWR | os.O_CREAT, CACHES.search

    def opens(args: tuple[Any, ...], frame: Frame) -> None:
        path, flags = args[0], args[2]
        if not isinstance(path, (str, bytes)):
            return
        text, real = fsdecode(path), resolved(path)
        if (is_hidden(text) or is_hidden(real)) and asked_by_gemm(frame):
            note("looks", real)
        elif isinstance(flags, int) and flags & writing and text != devnull:
            wrote(abspath(text))
            if of_others(text) and asked_by_gemm(frame):
                note("reaches", f"{text}, in a cache of torch or Triton")

    def lists(args: tuple[Any, ...], frame: Frame) -> None:
        path = resolved(args[0]) if isinstance(args[0], (str, bytes)) else ""
        if path and (path in above or is_hidden(path)) and asked_by_gemm(frame):
            note("looks", path)

    def changing(places: Sequence[int]) -> Handler:
        def changes(args: tuple[Any, ...], _frame: Frame) -> None:
            for path in (args[place] for place in places):
                if isinstance(path, (str, bytes)):
                    wrote(abspath(fsdecode(path)))

        return changes

    handlers: dict[str, Handler] = {"open": opens, "os.listdir": lists, "os.scandir": lists}
    handlers |= {event: changing(places) for event, places in CHANGING.items()}
    return handlers | {"os.utime": _aging(note, asked_by_gemm, handlers["os.utime"])}


def _aging(note: Note, asked_by_gemm: Callable[[Frame], bool], changes: Handler) -> Handler:
    """Return the handler of new times of files. It notes older times of files that nobody has written since this process began.

    Copied and unpacked files get an old time too, just after they were written.
    """
    fsdecode, abspath, stat, least_s = os.fsdecode, os.path.abspath, os.stat, OLDER_S
    begun_s, own = time.time(), os.path.join(os.getcwd(), "")

    def ages(args: tuple[Any, ...], frame: Frame) -> None:
        changes(args, frame)
        path, times, ns = args[:3]
        given = times or ns
        if not isinstance(path, (str, bytes)) or not isinstance(given, tuple) or not isinstance(new := given[1], (int, float)):
            return
        new_s = (float.__float__(new) if isinstance(new, float) else int.__float__(new)) / (1 if times else 10**9)
        try:
            old_s = stat(path).st_mtime
        except OSError:
            return
        is_older = new_s < old_s - least_s and old_s < begun_s - least_s
        if is_older and not (name := abspath(fsdecode(path))).startswith(own) and asked_by_gemm(frame):
            note("reaches", f"{name}, whose time it sets back: others take it for an older file")

    return ages


def _of_code(note: Note, of_gemm: Callable[[Frame], bool], sniffs: Callable[[Frame, str], bool]) -> dict[str, Handler]:
    """Return the handlers of events about objects and code."""
    frames, replacing, trusted = FRAMES, REPLACING, _folders()

    def reads(args: tuple[Any, ...], frame: Frame) -> None:
        if args[1] in frames and sniffs(frame, args[1]):
            note("looks", f"{args[1]} of a {type(args[0]).__name__}")

    def replaces(args: tuple[Any, ...], frame: Frame) -> None:
        if args[1] in replacing and of_gemm(frame):
            note("replaces", f"{args[1]} of {getattr(args[0], '__qualname__', type(args[0]).__name__)}")

    def names(args: tuple[Any, ...], frame: Frame) -> None:
        if isinstance(name := args[1], str) and name.startswith((*trusted[0], *trusted[1])) and of_gemm(frame):
            note("looks", f"code under the name {name}")

    handlers: dict[str, Handler] = {"compile": names, "code.__new__": names}
    handlers |= {"object.__getattr__": reads, "object.__setattr__": replaces}
    return handlers | {event: _sniffing(event, note, sniffs) for event in SNIFFS}


def _sniffing(event: str, note: Note, sniffs: Callable[[Frame, str], bool]) -> Handler:
    word = event.rpartition(".")[2]

    def looks(_args: tuple[Any, ...], frame: Frame) -> None:
        if sniffs(frame, word):
            note("looks", event)

    return looks


def _plain() -> Callable[[Any], Any]:
    """Return a function that makes Python's own string, bytes or tuple of one whose methods are the GEMM's, and of a path."""
    kinds, whole, fspath = (str, bytes, tuple), slice(None), os.fspath

    def plain(value: Any) -> Any:
        if hasattr(type(value), "__fspath__"):
            value = fspath(value)
        for kind in kinds:
            if issubclass(type(value), kind):
                return value if type(value) is kind else kind.__getitem__(value, whole)
        return value

    return plain


def journal(roots: Sequence[str]) -> tuple[Note, Callable[[], list[tuple[str, str]]]]:
    """Add the hooks. Return a function that adds an event, and one that takes the events since its last call, each once.

    Args:
        roots: files and folders of the GEMM's own code.
    """
    note, taken = _record()
    stdlib, packages = _folders()
    around = tuple(os.path.join(os.path.abspath(entry), "") for entry in sys.path if os.path.isdir(entry))
    trusted = (*stdlib, *packages, *(folder for folder in around if not any(root.startswith(folder) for root in roots)))
    of_gemm, sniffs = _origins((*roots, os.path.join(os.getcwd(), "")), trusted)  # its folder may lie in one of the others
    handlers = (
        _of_files(note, _asker(of_gemm, stdlib), _writer(note), _above(roots))
        | _of_code(note, of_gemm, sniffs)
        | of_processes(note)
    )
    looking: set[int] = set()
    getframe, thread, plain = sys._getframe, get_ident, _plain()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in handlers or (me := thread()) in looking:  # looking at frames is audited too
            return
        values = tuple([plain(x) for x in args])  # code of the GEMM runs here, while its events are noted, or not at all
        looking.add(me)
        try:
            handlers[event](values, getframe(1))
        finally:
            looking.discard(me)

    sys.addaudithook(hook)
    return note, taken
