"""Parallel compilation: once for each key, typed failures, progress, interruption."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_choices import LIMITS_S, fake

from gemmtune.choice import Status
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.selector import precompile as compilers
from gemmtune.selector.accidents import accident
from gemmtune.selector.offers import offers_for
from gemmtune.selector.precompile import Compilation, precompile
from gemmtune.settings import Settings
from gemmtune.timing.neighbours import Watch

SETTINGS = Settings(compile_threads=2, compile_timeout_s=60)


def test_nothing_to_compile_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.selector.precompile.WORKERS", None)
    assert precompile([fake("library")], SETTINGS) == {}


def test_waits_for_every_kernel_of_one_name(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "other"]
    seen: list[tuple[int, int]] = []
    with Compilation([fake("same", artifact=str(path)) for path in paths], SETTINGS) as compilation:
        compilation.wait_for_all(lambda done, total: seen.append((done, total)))
        assert all(path.exists() for path in paths)
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_compiled_kernels_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "made").write_text("")
    monkeypatch.setattr("gemmtune.selector.precompile.WORKERS", None)
    assert precompile([fake("made", artifact=str(tmp_path / "made"))], SETTINGS) == {}


def test_one_compilation_for_each_distinct_key(tmp_path: Path) -> None:
    artifacts = [tmp_path / f"artifact{i}" for i in range(4)]
    choices = [fake(f"{i}-{twin}", artifact=str(path)) for i, path in enumerate(artifacts) for twin in range(3)]
    seen: list[tuple[int, int]] = []
    assert precompile(choices, SETTINGS, lambda done, total: seen.append((done, total))) == {}
    lines = [path.read_text().splitlines() for path in artifacts]
    assert [len(text) for text in lines] == [1, 1, 1, 1]
    pids = Counter(int(text[0].split()[0]) for text in lines)
    assert os.getpid() not in pids
    assert len(pids) <= 2
    assert seen == [(done, 4) for done in range(5)]


def test_a_compiler_process_is_reused(tmp_path: Path) -> None:
    pids = set()
    for name in "ab":
        path = tmp_path / name
        assert precompile([fake(name, artifact=str(path))], dataclasses.replace(SETTINGS, compile_threads=1)) == {}
        pids.add(path.read_text().split()[0])
    assert len(pids) == 1


def test_compilers_see_no_gpu(tmp_path: Path) -> None:
    path = tmp_path / "artifact"
    precompile([fake("one", artifact=str(path))], SETTINGS)
    assert path.read_text().split(maxsplit=1)[1] == "False ''\n"


@pytest.mark.parametrize(("seen", "cause"), [("others used 90% of the cores", "it ran out of time"), ("", "")])
def test_a_late_compilation_of_a_busy_machine_is_an_accident(monkeypatch: pytest.MonkeyPatch, seen: str, cause: str) -> None:
    monkeypatch.setattr(Watch, "seen", lambda _: seen)
    settings = Settings(compile_threads=1, compile_timeout_s=0.5)
    [failure] = precompile([fake("hang", compiling="hang")], settings).values()
    assert (failure.status, accident(failure.reason)) == (Status.COMPILE_TIMEOUT, cause)


def test_failures_are_typed_and_the_rest_is_compiled(tmp_path: Path) -> None:
    good = [fake(f"good{i}", artifact=str(tmp_path / f"good{i}")) for i in range(3)]
    bad = [fake(kind, compiling=kind) for kind in ("error", "hang", "segfault", "raise")]
    twin = fake("twin", compiling="error")
    expected = {
        "fake:error": Status.COMPILE_ERROR,
        "fake:twin": Status.COMPILE_ERROR,
        "fake:hang": Status.COMPILE_TIMEOUT,
        "fake:segfault": Status.CRASHED,
        "fake:raise": Status.COMPILE_ERROR,
    }
    for limit_s in LIMITS_S:
        settings = Settings(compile_threads=2, compile_timeout_s=limit_s)
        failures = precompile([bad[0], good[0], bad[1], good[1], *bad[2:], twin, good[2]], settings)
        if {name: f.status for name, f in failures.items()} == expected:
            break
    assert {name: f.status for name, f in failures.items()} == expected
    assert "error: expected ';'" in failures["fake:error"].reason
    assert f"{limit_s:g} s (compile_timeout_s)" in failures["fake:hang"].reason
    assert "SIGSEGV" in failures["fake:segfault"].reason
    assert failures["fake:raise"].reason == "KeyError: 'tile'"
    assert all(Path(choice.artifact).exists() for choice in good)


def test_an_exception_in_the_progress_callback_ends_compilation(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 1:
            raise RuntimeError("stop here")

    choices = [
        fake("good", artifact=str(tmp_path / "good")),
        *(fake(f"hang{i}", compiling="hang", artifact=f"{i}") for i in range(3)),
    ]
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="stop here"):
        precompile(choices, SETTINGS, stop)
    assert time.monotonic() - begun < 20


def test_a_deadline_ends_the_waiting_and_kills_the_compilers(tmp_path: Path) -> None:
    made, hanging = fake("made", artifact=str(tmp_path / "made")), fake("hanging", compiling="hang")
    (tmp_path / "made").write_text("")
    begun = time.monotonic()
    assert precompile([made, hanging], SETTINGS, None, begun + 1.0) == {}
    assert precompile([hanging], SETTINGS, None, begun) == {}
    assert time.monotonic() - begun < SETTINGS.compile_timeout_s / 2


def test_compilation_goes_on_in_the_background_and_in_order(tmp_path: Path) -> None:
    first, second = (fake(name, artifact=str(tmp_path / name)) for name in ("first", "second"))
    stuck = fake("stuck", compiling="hang")
    begun = time.monotonic()
    with Compilation([first, stuck, second], SETTINGS) as compilation:
        seen: list[tuple[int, int]] = []
        assert compilation.wait([first], lambda done, total: seen.append((done, total))) == {}
        assert Path(first.artifact).exists()
        assert seen == [(0, 1), (1, 1)]
        assert compilation.wait([second, fake("library")]) == {}
        assert Path(second.artifact).exists()
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("installed", [True, False])
def test_compilers_are_prepared_ahead_with_what_they_import(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[object, ...]] = []
    monkeypatch.setattr(compilers.WORKERS, "prepare", lambda *arguments: prepared.append(arguments))
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: object() if installed else None)
    for most in (None, 1, 9):
        compilers.prepare_compiling(SETTINGS, most)
    assert [count for _, count, _ in prepared] == [2, 1, 2]
    modules = ("gemmtune.workers.compiling", "gemmtune.toolchain.cubin", "gemmtune.toolchain.triton_kernels")
    assert prepared[0] == ("compile", 2, (*modules, *(("triton.compiler",) if installed else ())))


@pytest.mark.turn(2, 8)
def test_kernels_for_a_gpu_are_compiled_without_torch(tmp_path: Path) -> None:
    """A process that compiles starts before torch's import would end. Choices of every template know such a compilation."""
    device, given = preset("sm90"), {"device_type": "cuda", "dtype": torch.bfloat16}
    problems = [
        Problem.mm(8, 256, 256, **given),
        Problem.mixed_mm(8, 256, 256, scales="group_128", encoding="int4", **given),
        Problem.bsr_mm(64, 256, 256, block=64, **given),
        Problem.grouped_mm(64, 256, 256, groups=4, **given),
    ]
    backends = Settings(backends=("triton", "cuda"))
    offers = [offers_for(p, device, backends, on_this_machine=False).choices for p in problems]
    choices = [c for offered in offers for name in ("triton", "cuda") for c in [c for c in offered if c.backend == name][:4]]
    compilations: dict[str, list[Any]] = {"triton": [], "cuda": []}
    for choice in choices:
        with contextlib.suppress(UnavailableError):  # no NVRTC
            compilations[choice.backend].append(choice.compilation())
    assert len(compilations["triton"]) == 16
    program = Path(__file__).with_name("compiling_program.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    job = pickle.dumps(([one for found in compilations.values() for one in found[:1]], Settings(cache_dir=str(tmp_path))))
    done = subprocess.run([sys.executable, str(program)], input=job, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["triton"] if importlib.util.find_spec("triton") else []
    made = {path.suffix for path in tmp_path.rglob("*.*")}
    assert {".ok"} | ({".cubin"} if compilations["cuda"] else set()) <= made
    # None of the others needs a module that imports torch.
    modules = {one.func.__module__ for found in compilations.values() for one in found}
    assert modules <= {"gemmtune.toolchain.cubin", "gemmtune.toolchain.triton_kernels"}


def test_a_compiler_that_cannot_start_raises_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("gemmtune.selector.precompile.WORKERS.take", refuse)
    with pytest.raises(OSError, match="no more processes"):
        precompile([fake("error", compiling="error")], SETTINGS)


def test_an_interrupt_kills_the_compilers_and_propagates() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        precompile([fake("hang", compiling="hang"), fake("hang2", compiling="hang", artifact="never")], SETTINGS)
    assert not [t for t in threading.enumerate() if t.name.startswith("gemmtune-compile")]
