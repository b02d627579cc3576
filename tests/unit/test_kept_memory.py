"""What a program with GPUs needs of torch: the current device, and memory that no CUDA graph's pool has. torch is a stand-in."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_choices import CLAIMS, PROBLEM, Fake

from gemmtune.backends.triton import workspace
from gemmtune.choice import Kernel
from gemmtune.device import preset
from gemmtune.dispatch.member import Member
from gemmtune.dispatch.strategies import bound
from gemmtune.problem.rows import row_classes
from gemmtune.settings import Settings
from gemmtune.toolchain.kept import is_ordered, kept

GPU = dataclasses.replace(preset("sm90"), index=1)


class Cuda(threading.local):
    """State of torch.cuda in a thread: the current device, and the current stream."""

    device, stream = 0, 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    now = Cuda()

    @contextlib.contextmanager
    def current(name: str, value: Any) -> Iterator[None]:
        before = getattr(now, name)
        setattr(now, name, value)
        yield
        setattr(now, name, before)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now.device)
    monkeypatch.setattr(torch.cuda, "device", lambda index: current("device", index))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle or 32, device))  # 0: one of torch's pool
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: (0, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: current("stream", stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return now


def test_kernels_are_loaded_and_bound_on_the_gpu_of_their_plan(cuda: Cuda) -> None:
    """The caches of plans know their GPU by its index, and a kernel is loaded on the current one."""
    places: list[int] = []

    class Noted(Fake):
        def load(self) -> None:
            places.append(cuda.device)

        def bind(self, loaded: object) -> Kernel:
            places.append(cuda.device)
            return super().bind(loaded)

        def at(self, problem: object, device: object) -> Noted:
            return self

    (rows_class,) = row_classes(PROBLEM)
    for device, expected in ((GPU, 1), (preset("sm90"), 0), (preset("avx2"), 0)):
        choice = Noted(name="fake:noted", backend="fake", problem=PROBLEM, claims=CLAIMS)
        for at_once in (True, False):
            member = Member(rows_class, 64, device, lambda _, choice=choice: choice)  # type: ignore[misc]
            if at_once:
                member.load([64])
            assert not isinstance(member.bound(PROBLEM), str)
        bound(PROBLEM, choice, "store", device, Settings())
        assert (set(places), cuda.device) == ({expected}, 0)
        places.clear()


def test_memory_of_a_stream_is_allocated_in_another_thread(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that warms up a CUDA graph allocates from the graph's pool, in which nothing may remain."""
    here, seen = threading.get_ident(), []

    def noted(*size: Any, **_: Any) -> torch.Tensor:
        seen.append((threading.get_ident() == here, cuda.stream))
        return torch.ones(1)

    for stream in (24, 0):
        assert kept(lambda: (threading.get_ident() == here, cuda.stream), 1, stream) == (False, (stream, 1))
    monkeypatch.setattr(workspace, "torch", SimpleNamespace(**vars(torch) | {"zeros": noted, "empty": noted}))
    arena = workspace._Arena(1)
    monkeypatch.setattr(workspace, "arena_of", lambda _device: arena)
    seen.clear()
    made = workspace.Workspace(device=1, size_bytes=8, counters=4)
    assert made.acquire(24) is made.acquire(24)
    assert seen == [(False, 0), (False, (24, 1)), (False, (24, 1))]


def test_captures_of_inductors_trees_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = SimpleNamespace(get_manager=lambda device, create_if_none_exists: managers.get(device))
    managers = {1: SimpleNamespace(stream=SimpleNamespace(cuda_stream=24))}
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    monkeypatch.setattr(torch._C, "_is_key_in_tls", lambda _name: True)
    assert not is_ordered(24, 1)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    assert [is_ordered(*x) for x in ((24, 1), (24, 0), (25, 1))] == [True, False, False]
    monkeypatch.setattr(torch._C, "_is_key_in_tls", lambda _name: False)
    assert not is_ordered(24, 1), "a thread for which Inductor has no trees"
