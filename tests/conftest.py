"""Common setup of all tests: a temporary cache folder, compiled kernels shared by the whole run, working Ctrl-C.

``GEMMTUNE_CACHE_DIR=FOLDER pytest`` uses compiled kernels of that folder and keeps new ones there for the next run. It does not
read or write a store in that folder.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import parallel
import pytest
import quick_compiler
import rotation
import torch
import worker_server
from extras import pytest_runtest_setup
from hypothesis.internal.conjecture import providers
from interpreter import interpreting_process
from parallel import pytest_collection_modifyitems, pytest_ignore_collect, pytest_runtest_protocol, pytest_xdist_auto_num_workers
from processes import Run

from gemmtune import settings
from gemmtune.device import DeviceInfo
from gemmtune.store import storefile
from gemmtune.store.store import _stores as opened_stores
from gemmtune.timing.limits import BUSY, measure_limits
from gemmtune.workers import worker
from gemmtune.workers.pool import WORKERS

__all__ = [
    "interpreted",
    "open_folder",
    "own_store",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "pytest_xdist_auto_num_workers",
    "shipped_compiler",
]

IDLE_S = 3600.0
"""Idle time after which a worker process ends. A long one saves tests from importing torch again each minute."""


class _Undelayed(sqlite3.Connection):
    """Connection that does not wait for the disk. Its files survive a kill all the same, and no test cuts the power."""

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Execute a statement, without a wait that it may ask for."""
        return super().execute(_NO_WAIT if statement.startswith("PRAGMA synchronous") else statement, *values)

    def executescript(self, script: str) -> sqlite3.Cursor:
        """Execute the script of a new file."""
        self.execute(_NO_WAIT)
        return super().executescript(script)


_NO_WAIT = "PRAGMA synchronous = OFF"
storefile.sqlite3 = SimpleNamespace(**vars(sqlite3) | {"connect": functools.partial(sqlite3.connect, factory=_Undelayed)})  # type: ignore[assignment]

if parallel.WORKER is None:
    _kept = os.environ.get("GEMMTUNE_CACHE_DIR")
    _folder = Path(tempfile.mkdtemp(prefix="gemmtune-tests-"))
    parallel.share_kernels(_folder / "cache", Path(_kept) if _kept else _folder / "kernels")
    os.environ["GEMMTUNE_CACHE_DIR"] = str(_folder / "cache")
    os.environ["GEMMTUNE_ROWS"] = "exact"  # no test uses another M's result of another test, except tests of ranges
    os.environ.setdefault("GEMMTUNE_NATIVE", "0")  # tests of plans inspect Python's table, test_native.py turns it on
    quick_compiler.put_on_path(_folder / "compiler")
    rotation.choose()
    settings.from_environment.cache_clear()

WORKERS._idle_s = IDLE_S
DEVICES = worker_server.measured_devices()
worker_server.shorten_rounds(DEVICES)

if sys.platform == "linux":
    _server = worker_server.Server()
    os.register_at_fork(after_in_child=_server.forget)
    worker.subprocess = worker_server.popen_of(_server)  # type: ignore[assignment]

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=100)
hypothesis.settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile("ci")  # or --hypothesis-profile=nightly
if hasattr(providers, "_get_local_constants"):
    # Newer versions draw constants of all modules loaded so far, so examples would depend on the tests that ran before.
    providers._get_local_constants = providers.Constants

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # for example in a shell script's background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Exclude objects made during collection from garbage collections. They live as long as the run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    """Return the header line with the part of the rotating cases that this run takes."""
    return rotation.header()


def pytest_unconfigure() -> None:
    """Remove the temporary cache folder of the run."""
    if parallel.WORKER is None:
        shutil.rmtree(_folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_graphs() -> None:
    """Forget the compiled graphs of earlier tests: Dynamo compiles the code of torch's own modules a few times only."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Exclude remaining objects of earlier files, such as caches, from garbage collections.

    Sessions of pytest within this one collect several times each. Together the collections took a fifteenth of a run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _store_of_one_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give each file of tests a store, in a cache folder with the kernels of all. Tables of other files would change what runs."""
    shared = Path(os.environ["GEMMTUNE_CACHE_DIR"])
    folder = parallel.folder_of_file(shared, request.node.path)
    os.environ["GEMMTUNE_CACHE_DIR"] = str(folder)
    settings.from_environment.cache_clear()
    yield
    os.environ["GEMMTUNE_CACHE_DIR"] = str(shared)
    settings.from_environment.cache_clear()
    _close_stores(folder)


@pytest.fixture(autouse=DEVICES == "gpu")
def _gpu_memory() -> Iterator[None]:
    """Free a test's GPU memory for other processes. Attribute faults of its kernels to it, not to the next test."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@functools.cache
def _limits(device: DeviceInfo, dtype_label: str) -> Mapping[str, float]:
    """Return limits with the uncertainty of a busy machine, which leaves their measurement a part of the cores."""
    return {name: value * BUSY for name, value in measure_limits(device, dtype_label).items()}


class _Unwatched:
    """Observer that sees nothing, in place of one that reads the files of all processes before and after each measurement."""

    def __init__(self, *_: object) -> None: ...

    def seen(self) -> str:
        return ""


@pytest.fixture(autouse=True, scope="session")
def _quiet_machine() -> Iterator[None]:
    """Treat the machine as quiet, although tests run in parallel. Measure its limits once, not for the store of each test."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("gemmtune.selector.session.Watch", _Unwatched)
        monkeypatch.setattr("gemmtune.timing.neighbours.disturbance", lambda *_: "")
        monkeypatch.setattr("gemmtune.timing.neighbours.LEAST_WATCH_S", 0.0)
        monkeypatch.setattr(
            "gemmtune.selector.session.measure_limits",
            lambda device, label, known: {name: value for name, value in _limits(device, label).items() if name not in known},
        )
        yield


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a store for this test only. Compiled kernels are shared. Tuning runs in this process, which is faster."""
    path = tmp_path / "store.sqlite"
    with settings.patch(store_path=str(path), tune_in_subprocess=False):
        yield path
    _close_stores(tmp_path)


def _close_stores(folder: Path) -> None:
    """Close the stores of a folder: a process keeps every store open, and has file descriptors for some hundred."""
    for opened in [known for known in opened_stores if known.is_relative_to(folder)]:
        opened_stores.pop(opened).close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user can reach. pytest's own is its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="gemmtune-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def gpus_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let default tables of GPUs that are not here be made by shipped data: nothing is compiled or run."""
    from gemmtune.selector import defaults, predictor, shipped

    monkeypatch.setattr(defaults.Compilation, "add", lambda *_: None)
    monkeypatch.setattr("gemmtune.selector.ranges.uncompiled", lambda *_: {})
    monkeypatch.setattr("gemmtune.selector.ranges.failures_of", lambda *_: {})
    known = predictor.shipped_predictor()
    assert known is not None
    machine = known.origin["machines"][0]
    monkeypatch.setattr(shipped, "fingerprint", lambda device, _: {**machine, "device": device.name})
    shipped.shipped_for.cache_clear()
    yield
    shipped.shipped_for.cache_clear()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Yield ``interpreted(function, *args, **kwargs)``: it calls an importable function in a process with Triton's interpreter."""
    pytest.importorskip("triton", reason="the interpreter is Triton's")
    with interpreting_process() as run:
        yield run


@pytest.fixture
def shipped_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile C++ fully optimized, as users do, without the tests' own compiler and its kernels."""
    monkeypatch.setenv("PATH", quick_compiler.shipped_path())
    now = settings.current()
    with settings.patch(cache_dir=str(now.folder / "shipped"), store_path=str(now.store_file)):
        yield
