"""What the tests of the store share: rows to put, and functions to run in a process of their own."""

from __future__ import annotations

import os
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gemmtune.choice import Status
from gemmtune.problem import Problem
from gemmtune.store.key import canonical
from gemmtune.store.store import Row

KEYS = tuple(
    Problem.mm(m, 64, 32, dtype=torch.float32, layout=layout, device_type="cpu").key for m in (16, 17) for layout in ("nn", "nt")
)
"""Keys of problems that differ in a size or only in strides."""
MACHINES = tuple(canonical({"device": "a CPU", "driver": driver, "timing": "graph"}) for driver in ("550.54.15", "560.35.03"))
NOBODY = 65534


def row(index: int = 0, *, key: str = KEYS[0], fingerprint: str = MACHINES[0], **fields: object) -> Row:
    """A row of choice number ``index``."""
    values: dict[str, object] = {
        "name": f"triton:mm_{index}",
        "backend": "triton",
        "content_hash": f"hash{index}",
        "status": Status.OK,
        "time_us": 10.0 + index,
        "error_over_bound": 0.25,
        "info": {"tile": [64, 128, 32], "stages": 4, "warps": 8},
    }
    return Row(key=key, fingerprint=fingerprint, **(values | fields))


def failure(index: int = 0, status: Status = Status.TIMED_OUT, **fields: object) -> Row:
    """A row of a choice that failed."""
    return row(index, **({"status": status, "time_us": None, "error_over_bound": None, "reason": "gave no answer"} | fields))


@contextmanager
def one_warning(pattern: str) -> Iterator[None]:
    """The block warns once, with a RuntimeWarning in whose text the pattern is found."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert len(texts) == 1, f"got {len(texts)} warnings, expected one: {texts}"
    assert re.search(pattern, texts[0]), f"got {texts[0]!r}, expected {pattern!r}"


def fork(work: Callable[[], None]) -> int:
    """Start ``work`` in a forked process and return its id. It exits with 0, or prints a traceback and exits with 1."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever happens, this process must not go on as a second pytest
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def in_child(work: Callable[[], None], *, user: int | None = None) -> None:
    """Run ``work`` in a forked process, for root as another user whom permissions bind, and see that it succeeds."""

    def as_user() -> None:
        if user is not None and os.getuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        work()

    assert status_of(fork(as_user)) == 0, "the child failed; its traceback is in the captured output"


def status_of(child: int) -> int:
    """Wait for a child: its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(child: int) -> None:
    """SIGKILL to a child that runs forever."""
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL


def journals(path: Path) -> list[Path]:
    """The files of a store that hold data."""
    return [p for p in (path, path.with_name(path.name + "-wal")) if p.exists()]
