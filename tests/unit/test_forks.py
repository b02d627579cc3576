"""Forks of a process that multiplies: the child multiplies too, by torch and by compiled kernels, and waits for nobody."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import forks, settings
from gemmtune.backends.table import load
from gemmtune.choice import Choice, Kernel
from gemmtune.declaration.named import found_at
from gemmtune.device import detect
from gemmtune.problem import Problem

LIMIT_S = 30
A, B = torch.randn(300, 300), torch.randn(300, 300)
EXPECTED = (A @ B).numpy()
PROBLEM = Problem.mm(300, 300, 300, dtype=torch.float32, layout="nn", device_type="cpu")


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    with settings.patch(template_min_gemm_size=0) as given:
        choice: Choice = next(iter(load("cpp").enumerate(PROBLEM, detect("cpu"), given).choices))
    choice.compile()
    return choice.build()


def by_kernel(kernel: Kernel) -> bool:
    out = torch.empty(300, 300)
    kernel.run(out, (A, B), ())
    return bool((abs(out.numpy() - EXPECTED) < 1e-2).all())


def by_torch() -> bool:
    return bool((abs(torch.mm(A, B).numpy() - EXPECTED) < 1e-2).all())


def status_of(child: Callable[[], bool]) -> int | str:
    """The exit status of a fork that runs a function: 0 if that returns True."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        status = 1
        try:
            status = 0 if child() else 3
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return signal.Signals(-code).name if code < 0 else code


@contextlib.contextmanager
def busy(*products: Callable[[], object]) -> Iterator[None]:
    """Threads that multiply all the time."""
    ending = threading.Event()

    def work(product: Callable[[], object]) -> None:
        while not ending.is_set():
            product()

    workers = [threading.Thread(target=work, args=(product,)) for product in products]
    for thread in workers:
        thread.start()
    time.sleep(0.05)
    try:
        yield
    finally:
        ending.set()
        for thread in workers:
            thread.join()


@pytest.mark.turn(5, 8)
def test_children_of_a_process_that_multiplies_multiply(kernel: Kernel):
    """GNU's OpenMP would wait for its lost threads, or crash in the memory that a new thread got."""
    threads = torch.get_num_threads()

    def child() -> bool:
        return all(by_kernel(kernel) and by_torch() for _ in range(3)) and torch.get_num_threads() == threads

    assert by_torch()
    assert by_kernel(kernel)
    assert [status_of(child) for _ in range(3)] == [0] * 3
    with busy(by_torch, lambda: by_kernel(kernel)):
        assert [status_of(child) for _ in range(5)] == [0] * 5
        assert status_of(lambda: status_of(child) == 0) == 0
    found: list[object] = []
    with busy(by_torch):  # the forking thread has not multiplied
        forking = threading.Thread(target=lambda: found.append(status_of(child)))
        forking.start()
        forking.join()
    assert found == [0]
    assert by_torch()
    assert by_kernel(kernel)


def test_a_child_whose_parent_keeps_its_threads_says_so_and_uses_one(kernel: Kernel, monkeypatch: pytest.MonkeyPatch):
    class Old:
        """A runtime without omp_pause_resource_all."""

    def child() -> bool:
        alone = torch.get_num_threads() == 1 and by_kernel(kernel) and by_torch()
        return alone and "torch and gemmtune use one thread here. Fork before the first product" in str(seen[0].message)

    monkeypatch.setattr(forks, "openmp", Old)
    threads = torch.get_num_threads()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert status_of(child) == 0
    assert torch.get_num_threads() == threads
    assert forks.threads.usable


def test_runtimes_that_follow_forks_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    class Other:
        def omp_pause_resource_all(self, kind: int) -> int:
            raise AssertionError(kind)

    other = Other()
    setattr(other, forks.NOT_GNU, None)
    for runtime in (other, None):
        monkeypatch.setattr(forks, "openmp", lambda runtime=runtime: runtime)
        assert status_of(lambda: forks.threads.usable) == 0


def test_the_runtime_is_that_of_torch():
    found = forks.openmp()
    assert isinstance(found, ctypes.CDLL)
    assert hasattr(found, "omp_get_num_threads")


def test_locks_are_free_in_a_child():
    """A thread that multiplies by a prepacked weight may hold its lock at any time."""
    held, packed = forks.lock(), gemmtune.prepack(B)
    with held, packed._lock:
        assert status_of(lambda: held.acquire(timeout=5) and packed._lock.acquire(timeout=5)) == 0
        assert held.locked()


@contextlib.contextmanager
def importing(
    name: str, load: Callable[[str], object], folder: Path, monkeypatch: pytest.MonkeyPatch, *, gated: bool = False
) -> Iterator[threading.Thread]:
    """A thread that imports a slow module. It goes on after half a second, or with ``gated`` at the end of the context."""
    started, ended = threading.Event(), threading.Event()
    wait_s = LIMIT_S if gated else 0.5
    (folder / "slow_to_import.py").write_text(f"import builtins\nbuiltins.started.set()\nbuiltins.ended.wait({wait_s})\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(gemmtune, "__path__", [*gemmtune.__path__, str(folder)])
    monkeypatch.setattr(builtins, "started", started, raising=False)
    monkeypatch.setattr(builtins, "ended", ended, raising=False)
    thread = threading.Thread(target=load, args=(name,))
    thread.start()
    try:
        assert started.wait(LIMIT_S)
        yield thread
    finally:
        ended.set()
        thread.join()
        sys.modules.pop(name)


@pytest.mark.parametrize(("name", "load"), [("gemmtune.slow_to_import", importlib.import_module), ("slow_to_import", found_at)])
def test_a_fork_waits_for_an_import_by_another_thread(name, load, tmp_path, monkeypatch):
    """Otherwise the child waits forever for the module's lock, whose owner is lost."""
    with importing(name, load, tmp_path, monkeypatch):
        assert status_of(lambda: importlib.import_module(name).__name__ == name) == 0


@pytest.mark.parametrize(("load", "longest_s"), [(found_at, 0.05), (importlib.import_module, LIMIT_S)])
def test_a_fork_waits_neither_too_long_nor_for_imports_of_others(load, longest_s, tmp_path, monkeypatch):
    """The importing thread may itself wait for the forking one, and a program may run within an import of its own."""
    monkeypatch.setattr(forks, "LONGEST_WAIT_S", longest_s)
    with importing("slow_to_import", load, tmp_path, monkeypatch, gated=True) as thread:
        forks.wait_for_imports()
        assert thread.is_alive()
