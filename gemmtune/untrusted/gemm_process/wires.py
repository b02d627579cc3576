"""Functions without an audit event, each of which notes its call.

They reach other processes, raise a priority, set seeds, end the process later, or hide from the profiler.
"""

from __future__ import annotations

import builtins
import faulthandler
import os
import posix
import random
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

Note = Callable[[str, str], None]
OF_PROCESSES = {"pidfd_open": 0, "sched_setaffinity": 0, "sched_setscheduler": 0, "sched_setparam": 0, "setpriority": 1}
"""Functions with the place of the process among their arguments. A call for another process is an event."""
OF_PROFILER = ("_enable_record_function", "_enable_profiler", "_enable_profiler_legacy", "_disable_profiler")
"""Functions by which code learns if it is profiled, or works unseen. The profiler calls some of them itself."""
NOTING: tuple[tuple[Any, str, str, int | None], ...] = (
    *((owner, name, "reaches", place) for owner in (os, posix) for name, place in OF_PROCESSES.items()),
    *((x, name, "looks", None) for x in (torch._C._autograd, torch.autograd, profiler) for name in OF_PROFILER if hasattr(x, name)),
    *((owner, "seed", "sets", None) for owner in (random, np.random)),
    (faulthandler, "dump_traceback_later", "sets", None),
)
"""Functions whose calls are events, with the kind of these."""
NO_NAME = "<frozen runpy>"
"""Name of our code in a stack, which is one of Python's own."""


def wired(note: Note, is_own: Callable[[int], bool]) -> Callable[[bool], None]:
    """Let the functions note their calls. Return a function that lets those of the profiler be silent, or speak again.

    Args:
        is_own: returns True for a process that this one has started.
    """
    silent: list[bool] = []

    def noting(owner: Any, name: str, kind: str, place: int | None) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if place is None:
                if not silent:
                    note(kind, f"{owner.__name__}.{name}")
            elif isinstance(process := (*args, *kwargs.values(), 0)[place], int) and process and not is_own(process):
                note(kind, f"{owner.__name__}.{name} of process {process}")
            return original(*args, **kwargs)

        setattr(owner, name, noted)

    for known in NOTING:
        noting(*known)
    return lambda quiet: silent.append(True) if quiet else silent.clear()


def drawing(note: Note) -> Callable[[], None]:
    """Return a function that draws random numbers, and notes if it has drawn the same one before."""
    integers, bits, of_numpy, most = torch.randint, random.getrandbits, np.random.randint, 2**62
    draws: Mapping[str, Callable[[], int]] = {
        "torch": lambda: int(integers(most, (), device="cpu", dtype=torch.int64)),
        "Python": lambda: bits(62),
        "numpy": lambda: int(of_numpy(most)),
    }
    drawn = {name: set[int]() for name in draws}

    def draw() -> None:
        for name, number in [(name, one()) for name, one in draws.items()]:
            if number in drawn[name]:
                note("sets", f"the random numbers of {name} to earlier ones")
            drawn[name].add(number)

    return draw


def anonymous(modules: Sequence[ModuleType]) -> None:
    """Give the code of modules names that tell nothing, so that a stack shows neither who calls a GEMM nor for what."""

    def renamed(code: CodeType) -> CodeType:
        consts = tuple(renamed(x) if isinstance(x, CodeType) else x for x in code.co_consts)
        return code.replace(co_filename=NO_NAME, co_name="run", co_consts=consts, **qualified)

    qualified: dict[str, Any] = {"co_qualname": "run"} if hasattr(CodeType, "co_qualname") else {}
    spaces: list[Mapping[str, Any]] = [vars(module) for module in modules]
    own = {space["__name__"] for space in spaces}
    spaces += [vars(x) for space in spaces[:] for x in space.values() if isinstance(x, type) and x.__module__ in own]
    for space in spaces:
        for value in list(space.values()):
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and function.__module__ in own:
                function.__code__ = renamed(function.__code__)
