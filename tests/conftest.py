"""What every test starts from: a cache folder of the run's own, compiled kernels that the whole run shares, and Ctrl-C at work.

``GEMMTUNE_CACHE_DIR=FOLDER pytest`` takes compiled kernels from that folder and leaves new ones there for the next run; a store
that is there is neither read nor written.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import hypothesis
import parallel
import pytest
import quick_compiler
import rotation
import torch
import worker_server
from interpreter import interpreting_process
from parallel import pytest_collection_modifyitems, pytest_ignore_collect, pytest_runtest_protocol, pytest_xdist_auto_num_workers
from processes import Run

from gemmtune import settings
from gemmtune.device import DeviceInfo
from gemmtune.timing.limits import measure_limits
from gemmtune.workers import worker
from gemmtune.workers.pool import WORKERS

__all__ = [
    "interpreted",
    "own_store",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_protocol",
    "pytest_xdist_auto_num_workers",
    "shipped_compiler",
]

IDLE_S = 3600.0
"""Worker processes that compile or measure wait for the next test that needs them, instead of importing torch anew each minute."""

if parallel.WORKER is None:
    _kept = os.environ.get("GEMMTUNE_CACHE_DIR")
    _folder = Path(tempfile.mkdtemp(prefix="gemmtune-tests-"))
    parallel.share_kernels(_folder / "cache", Path(_kept) if _kept else _folder / "kernels")
    os.environ["GEMMTUNE_CACHE_DIR"] = str(_folder / "cache")
    os.environ["GEMMTUNE_ROWS"] = "exact"  # what one test has tuned for another M is no answer here; tests of ranges say so
    os.environ.setdefault("GEMMTUNE_NATIVE", "0")  # tests of plans look into Python's table; test_native.py turns it on
    quick_compiler.put_on_path(_folder / "compiler")
    rotation.choose()
    settings.from_environment.cache_clear()

WORKERS._idle_s = IDLE_S

if sys.platform == "linux":
    _server = worker_server.Server()
    os.register_at_fork(after_in_child=_server.forget)
    worker.subprocess = worker_server.popen_of(_server)  # type: ignore[assignment]

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=100)
hypothesis.settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile("ci")  # or --hypothesis-profile=nightly

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell's script starts in the background, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is made until all tests are collected lives as long as the run: no collection of garbage need look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    """Which part of the cases that rotate this run takes."""
    return rotation.header()


def pytest_unconfigure() -> None:
    """Remove the run's cache folder."""
    if parallel.WORKER is None:
        shutil.rmtree(_folder, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """What the files before have left, such as caches, no collection of garbage looks at again.

    Sessions of pytest inside of this one collect several times each, and all of it together took a fifteenth of a run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _gpu_memory() -> Iterator[None]:
    """What a test has freed of a GPU's memory is free for the other processes, too; a fault of its kernels is its own, not the next
    test's."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@functools.cache
def _limits(device: DeviceInfo, dtype_label: str) -> Mapping[str, float]:
    return measure_limits(device, dtype_label)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured counts as measured on a quiet machine: tests run beside each other. Its limits are measured once, not for
    each test's own store."""
    monkeypatch.setattr("gemmtune.selector.measure.disturbance", lambda *_: "")
    monkeypatch.setattr(
        "gemmtune.selector.session.measure_limits",
        lambda device, label, known: {name: value for name, value in _limits(device, label).items() if name not in known},
    )


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Path]:
    """A store of the test's own; compiled kernels are shared with the other tests. Tunes in this process, which is quicker."""
    path = tmp_path / "store.sqlite"
    with settings.patch(store_path=str(path), tune_in_subprocess=False):
        yield path


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """``interpreted(function, *args, **kwargs)`` calls an importable function in a process whose Triton interprets."""
    pytest.importorskip("triton", reason="the interpreter is Triton's")
    with interpreting_process() as run:
        yield run


@pytest.fixture
def shipped_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ is compiled as users compile it, with all optimization: without the tests' own compiler."""
    monkeypatch.setenv("PATH", quick_compiler.shipped_path())
