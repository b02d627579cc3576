"""The processes of one test run: how many, what they share, and the tests beside which no other may run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from gemmtune.cache import make_private

__all__ = [
    "COMPILED",
    "WORKER",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_protocol",
    "pytest_xdist_auto_num_workers",
    "share_kernels",
    "spread",
    "turn",
]

T = TypeVar("T")

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
"""The name of this process among those that run tests; None in the one that starts them, and where it runs them itself."""
COMPILED = ("cpp", "cuda", "cutlass", "limits", "native", "triton")
"""The folders of a cache folder that hold compiled kernels, each under a name that says what it was made of and by what."""
MOST_PROCESSES = 16
GPU_BYTES = 6 << 30
"""What one process may need of a GPU's memory."""
FEW_FILES = 4
"""So many files are run by the process that was started: others would need longer to import torch."""


def share_kernels(folder: Path, kernels: Path) -> None:
    """Make ``folder`` a cache folder with a store of its own, whose compiled kernels are those of ``kernels``."""
    make_private(folder)
    for name in COMPILED:
        make_private(kernels / name)
        (folder / name).symlink_to((kernels / name).resolve(), target_is_directory=True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process for each core, as far as the GPU's memory goes; none but this one for a file or two, given by name."""
    if len(config.args) <= FEW_FILES and all(".py" in argument for argument in config.args):
        return 0
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if torch.cuda.is_available():
        count = min(count, torch.cuda.get_device_properties(0).total_memory // GPU_BYTES)
    # Each process compiles by itself then: one that starts compilers for all cores would take them from the others.
    os.environ.setdefault("GEMMTUNE_COMPILE_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(1, count))))
    return max(1, count)


def spread(names: Sequence[T], count: int, slow: Container[T], alone: Container[T]) -> list[T]:
    """The order in which ``count`` processes, each of which gets an equal share of the list, begin with the slow ones.

    Those that run alone come last: whoever waits for them has nothing else to do by then.
    """
    first = [name for name in names if name in slow and name not in alone]
    rest = iter([name for name in names if name not in slow and name not in alone] + [name for name in names if name in alone])
    found: list[T] = []
    for i in range(count):
        size = (len(names) - len(found)) // (count - i)
        own = first[i::count]
        found += own + list(islice(rest, max(0, size - len(own))))
    return found + list(rest)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, files without a word of it are not imported by each of the processes."""
    if config.option.markexpr != "gpu" or not collection_path.match("test_*.py") or "gpu" in collection_path.read_text("utf-8"):
        return None
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, the slow ones are not left for the end, when the other processes are idle."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if count:
        slow, alone = ({item for item in items if item.get_closest_marker(name)} for name in ("slow", "alone"))
        items[:] = spread(items, count, slow, alone)


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for a turn among the processes that share ``folder``: ``alone``, beside nobody's, or beside all that are not alone.

    Whoever waits to be alone lets others begin, so that one process waits until all are done instead of all for one.
    """
    with (folder / "turn").open("w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test marked ``alone`` runs beside no other of the run; no test's time limit counts the wait."""
    if WORKER is None:
        return (yield)
    with turn(Path(os.environ["GEMMTUNE_CACHE_DIR"]), alone=item.get_closest_marker("alone") is not None):
        return (yield)
