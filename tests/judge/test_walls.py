"""A GEMM that deceives the worker in which it is measured never becomes the pick."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import settings, untrusted
from gemmtune.backends.own.choice import OwnChoice
from gemmtune.backends.own.targets import loaded
from gemmtune.choice import Status
from gemmtune.declaration.subject import Subject
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.selector import walls
from gemmtune.untrusted import memory
from gemmtune.untrusted.gemm_process.parts import parts_of
from gemmtune.untrusted.gemm_process.state import GETTER
from gemmtune.untrusted.gemm_process.system import is_of_glibc
from gemmtune.untrusted.subject import rival

HERE = str(Path(__file__).parent)
DECEIVING = ("forges_the_worker", "fast_among_choices", "stale_after_thirty")


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(HERE)
    yield
    walls._known.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "hacks"]:
        del sys.modules[name]


def tuned(*targets: str) -> gemmtune.TuningResult:
    with settings.patch(extra_choices=targets, backends=("aten",), busy="accept"):
        return gemmtune.tune("mm", torch.randn(96, 128), torch.randn(128, 112), progress=False)


@pytest.mark.turn(1, 4)
def test_no_deceiving_gemm_is_picked() -> None:
    [result] = tuned(*(f"hacks.tuner:{name}" for name in DECEIVING))
    assert result.pick == "aten:mm"
    outcomes = {outcome.name: outcome for outcome in result.outcomes}
    forged, stale = outcomes["own:hacks.tuner:forges_the_worker"], outcomes["own:hacks.tuner:fast_among_choices"]
    assert forged.status is Status.DISHONEST
    assert "by a clock out of its reach" in forged.reason
    assert stale.status in (Status.DISHONEST, Status.OK)


def test_honest_gemm_passes() -> None:
    [result] = tuned("honest:product")
    (own,) = (outcome for outcome in result.outcomes if outcome.name == "own:honest:product")
    assert own.status is Status.OK, own.reason


def test_without_a_process_of_its_own_a_gemm_is_trusted_and_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_device: str) -> None:
        raise UnavailableError("no memory can be shared here")

    monkeypatch.setattr(walls, "rival", unavailable)
    choice = own_choice("honest:product")
    with pytest.warns(RuntimeWarning, match="own:honest:product is trusted: .* no memory can be shared here"):
        assert walls.refusals({choice.name: choice}, {choice.name: 1.0}) == {}


def test_operands_that_are_too_large_for_the_walls_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CPU_BYTES", 2**20)
    monkeypatch.setattr(walls, "rival", rival.__wrapped__)  # the shared process of torch has all its memory
    choice = own_choice("honest:product")
    reasons = walls.refusals({choice.name: choice}, {choice.name: 1e6})
    assert "no call was possible: its operands and its result need" in reasons[choice.name]


def test_a_call_that_does_nothing_takes_time_on_a_cpu() -> None:
    problem = own_choice("honest:product").problem
    assert walls._call_s(problem, rival("cpu")[1]) > walls.GPU_EXTRA_S


def own_choice(target: str) -> OwnChoice:
    source = loaded(target)
    assert isinstance(source.found, Subject)
    return OwnChoice.of(source, source.found, Problem.mm(600, 600, 600, dtype=torch.float32))


def test_nobody_cuts_off_the_memory_of_operands() -> None:
    """Whoever looked at what is cut off would die of it."""
    shared = memory.Memory(torch.device("cpu"))
    for size in (0, shared.size // 2, shared.size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.fd, size)
    assert int(shared.bytes[-1]) == 0


ASKS = """
import sys, torch
asked = []
for owner in (torch.cuda, torch.accelerator, torch._C):
    for name in ("is_available", "device_count", "_lazy_init", "_cuda_getDeviceCount", "_cuda_init"):
        if hasattr(owner, name):
            setattr(owner, name, lambda *args, name=name: asked.append(name) or 0)
sys.path.insert(0, sys.argv[1])
import gemm_process.first
print(asked)
"""


class Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")


def test_modules_that_import_others_when_they_are_asked_stay_as_they_are() -> None:
    assert [(part.name, [*part.others()]) for part in parts_of([Lazy("some.lazy"), Lazy])] == [
        ("some.lazy", []), (f"{__name__}.Lazy", []),
    ]  # fmt: skip


def test_counters_of_any_python_are_no_settings() -> None:
    """Python 3.12 counts interned strings, whose number each import changes."""
    counters = ("getunicodeinternedsize", "getallocatedblocks", "getrefcount", "get_count", "getloadavg", "get_native_id")
    assert not [name for name in counters if GETTER.match(name)]
    assert all(map(GETTER.match, ("getswitchinterval", "get_default_dtype", "isenabled")))


@pytest.mark.parametrize(
    ("file", "preload", "is_so"),
    [
        ("/lib/libc.so.6", "", True),
        ("/usr/bin/python3", "", True),
        ("/usr/bin/python3", "/lib/libjemalloc.so.2", False),
        ("/lib/libjemalloc.so.2", "/lib/libjemalloc.so.2", False),
    ],
)
def test_the_allocator_is_that_of_glibc(file: str, preload: str, is_so: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.untrusted.gemm_process.system.PRELOADED", "/nowhere")
    variables = f"HOME=/\0{'LD_PRELOAD=' if preload else 'LD_PRELOADED='}{preload}\0"
    assert is_of_glibc(os.fsencode(file), variables.encode()) is is_so


def test_the_first_process_asks_for_no_gpu() -> None:
    """After such a question CUDA starts in no fork of it."""
    folder = Path(untrusted.__file__).parent
    ran = subprocess.run([sys.executable, "-c", ASKS, str(folder)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
