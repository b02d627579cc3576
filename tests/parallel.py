"""Processes of one test run: their number, shared files, and tests that must run in isolation."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pytest
import rotation
import torch

from gemmtune.cache import make_private

__all__ = [
    "COMPILED",
    "WORKER",
    "folder_of_file",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_protocol",
    "pytest_xdist_auto_num_workers",
    "share_kernels",
    "spread",
    "thins",
    "turn",
]

T = TypeVar("T")

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
"""Name of this process among pytest-xdist's workers. None in the process that starts them, or that runs the tests itself."""
_SHARED = Path(os.environ.get("GEMMTUNE_CACHE_DIR", ""))
"""In a worker, the cache folder that all share."""
COMPILED = ("cpp", "cuda", "cutlass", "limits", "native", "shipped", "triton")
"""Subfolders of a cache folder for compiled kernels, which are named by the hash of their source."""
UNOPTIMIZED = ("cpp", "limits", "native")
"""Those that the tests' own compiler fills. They lie below ``tests``, where no user of the folder finds them."""
MOST_PROCESSES = 16
GPU_BYTES = 6 << 30
"""GPU memory that one process may need."""
FEW_FILES = 4
"""Maximum number of files that the started process runs itself. Other processes would need longer to import torch."""


def share_kernels(folder: Path, kernels: Path) -> None:
    """Make ``folder`` a cache folder with a new store and with the compiled kernels of ``kernels``."""
    make_private(folder)
    for name in COMPILED:
        place = kernels / "tests" / name if name in UNOPTIMIZED else kernels / name
        make_private(place)
        (folder / name).symlink_to(place.resolve(), target_is_directory=True)


def folder_of_file(shared: Path, file: Path) -> Path:
    """Return a cache folder for one file of tests in this process. It has a separate store, and the kernels of ``shared``."""
    folder = shared / "files" / f"{WORKER or 'main'}-{file.stem}"
    make_private(folder)
    for name in COMPILED:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to((shared / name).resolve(), target_is_directory=True)
    return folder


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one process for each core, limited by the GPU's memory, or 0 for a few files given by name."""
    if len(config.args) <= FEW_FILES and all(".py" in argument for argument in config.args):
        return 0
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if torch.cuda.is_available():
        count = min(count, torch.cuda.get_device_properties(0).total_memory // GPU_BYTES)
    # Each process then compiles on its share of the cores. Compilers on all cores would slow down the others.
    os.environ.setdefault("GEMMTUNE_COMPILE_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(1, count))))
    return max(1, count)


def spread(
    names: Sequence[T], count: int, slow: Container[T], alone: Container[T], file: Callable[[T], Hashable] = lambda name: name
) -> list[T]:
    """Return the order of ``names`` in which ``count`` processes, with equal shares of the list, begin with the slow ones.

    One process gets all slow tests of a file, whose setup they share. Those that run in isolation come last, when processes that
    wait for them have nothing else to do.
    """
    files: dict[Hashable, list[T]] = {}
    for name in names:
        if name in slow and name not in alone:
            files.setdefault(file(name), []).append(name)
    first: list[list[T]] = [[] for _ in range(count)]
    for together in files.values():
        min(first, key=len).extend(together)
    rest = iter([name for name in names if name not in slow and name not in alone] + [name for name in names if name in alone])
    found: list[T] = []
    for i in range(count):
        size = (len(names) - len(found)) // (count - i)
        found += first[i] + list(islice(rest, max(0, size - len(first[i]))))
    return found + list(rest)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that do not mention a GPU under ``-m gpu``, so that not every process imports them."""
    if config.option.markexpr != "gpu" or not collection_path.match("test_*.py") or "gpu" in collection_path.read_text("utf-8"):
        return None
    return True


def thins(config: pytest.Config) -> bool:
    """Return True unless the caller names single tests or a marker."""
    named = bool(config.option.keyword) or any("::" in argument for argument in config.args)
    return not named and "not gpu" in config.option.markexpr


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other commits' cases. Move slow tests to the front if there are several processes, which would idle at the end."""
    if thins(config):
        kept = rotation.thinned(items)
        if len(kept) < len(items):
            config.hook.pytest_deselected(items=sorted(set(items) - set(kept), key=lambda item: item.nodeid))
            items[:] = kept
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if count:
        slow, alone = ({item for item in items if item.get_closest_marker(name)} for name in ("slow", "alone"))
        items[:] = spread(items, count, slow, alone, lambda item: item.path)


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for a turn among the processes that share ``folder``. With ``alone``, run when no other process runs.

    A process that waits for isolation lets others begin. It waits until all are done, instead of all waiting for it.
    """
    with (folder / "turn").open("w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test marked ``alone`` in isolation. The wait does not count towards any test's time limit."""
    if WORKER is None:
        return (yield)
    with turn(_SHARED, alone=item.get_closest_marker("alone") is not None):
        return (yield)
