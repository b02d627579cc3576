"""The native look-up on a GPU: every kind of launch, streams, graphs, threads, devices and precision flags."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.dispatch.plan import forget_plans
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.ops import operate as path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from native_calls import arguments, found

pytestmark = pytest.mark.gpu
QUICK = {"search": "quick", "max_profiling_configs": 2, "native": True}


@pytest.fixture(autouse=True)
def _in_place(own_store: object) -> Iterator[None]:
    native.begun = False
    lookup.load(path.FOR_NATIVE)
    forget_plans()
    yield
    native.call, native.layer, native.begun = None, None, True
    forget_plans()


def pair(size: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return a, b


def warmed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The result by the native look-up."""
    for _ in range(3):
        result = gemmtune.mm(a, b)
    assert found(arguments("mm", a, b))
    return result


@pytest.mark.parametrize("backend", ["triton", "cuda", "cublaslt", "aten", "cutlass"])
def test_native_launches_give_the_bits_of_python(backend: str) -> None:
    if backend == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of cuda are for sm90")
    a, b = pair()
    inp = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    with settings.patch(backends=(backend,), **QUICK):
        for call in (
            lambda: gemmtune.mm(a, b),
            lambda: gemmtune.mm(a, b.t()),
            lambda: gemmtune.mm(a, b, out=torch.empty_like(a)),
            lambda: gemmtune.addmm(inp, a, b, alpha=2, beta=0.5),
            lambda: gemmtune.mm(a, b, epilogue=torch.relu),
            lambda: gemmtune.bmm(a[None], b[None]),
        ):
            looked, native.call = native.call, None
            want = call()
            native.call = looked
            for _ in range(3):
                got = call()
            assert torch.equal(got, want)
    assert native.module.count() > 0


def test_streams_graphs_and_threads() -> None:
    a, b = pair()
    with settings.patch(backends=("triton",), **QUICK):
        want = warmed(a, b)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other = gemmtune.mm(a, b)
        torch.cuda.synchronize()
        assert torch.equal(other, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gemmtune.mm(a, b)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, want)
    wrong: list[object] = []

    def work() -> None:
        with settings.patch(backends=("triton",), **QUICK), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(gemmtune.mm(a, b), want):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_flags_autocast_and_other_devices() -> None:
    a, b = pair()
    with settings.patch(backends=("aten",), native=True):
        warmed(a, b)
        call = arguments("mm", a, b)
        matmul = torch.backends.cuda.matmul
        before = matmul.allow_bf16_reduced_precision_reduction
        before = before[0] if isinstance(before, tuple) else before
        try:
            matmul.allow_bf16_reduced_precision_reduction = not before
            assert found(call) is False
        finally:
            matmul.allow_bf16_reduced_precision_reduction = before
        assert found(call)
        single = pair(64, torch.float32)
        warmed(*single)
        precision = matmul.fp32_precision
        try:
            matmul.fp32_precision = "tf32" if precision != "tf32" else "ieee"
            assert found(arguments("mm", *single)) is False
        finally:
            matmul.fp32_precision = precision
        with torch.autocast("cuda", dtype=torch.float16):
            assert found(call) is None
        if torch.cuda.device_count() > 1:
            with torch.cuda.device(1):
                assert found(call) is None
