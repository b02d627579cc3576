"""The native look-up on a GPU: every kind of launch, streams, graphs, threads, devices and precision flags."""

from __future__ import annotations

import contextvars
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.backends.table import load
from gemmtune.device import detect
from gemmtune.dispatch.plan import Plan
from gemmtune.native.lookup import native
from gemmtune.native.records import record_of
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.settings import Settings

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from native_calls import arguments, found, in_place

pytestmark = pytest.mark.gpu
QUICK = {"search": "quick", "max_profiling_configs": 2, "native": True}


@pytest.fixture(autouse=True)
def _in_place(own_store: object) -> Iterator[None]:
    with in_place():
        yield


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
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: gemmtune.mm(a, b),
        lambda: gemmtune.mm(a, b, out=torch.empty_like(a)),
        lambda: gemmtune.mm(a, b.t()),
        lambda: gemmtune.addmm(inp, a, b, alpha=2, beta=0.5),
        lambda: gemmtune.mm(a, b, epilogue=torch.relu),
        lambda: gemmtune.bmm(a[None], b[None]),
    ]
    quick = QUICK
    if backend == "cutlass":  # half a minute of nvcc for each kernel
        calls, quick = calls[:2], QUICK | {"max_profiling_configs": 1}
    with settings.patch(backends=(backend,), **quick):
        for call in calls:
            looked, native.call = native.call, None
            want = call()
            native.call = looked
            for _ in range(3):
                got = call()
            assert torch.equal(got, want)
    assert native.module.count() > 0


KERNELS: dict[str, tuple[str, tuple[int, int, int], Callable[[Any], bool]]] = {
    "cublaslt": ("cublaslt", (128, 128, 128), lambda x: not x.info["workspace_bytes"]),
    "cublaslt with a workspace": ("cublaslt", (64, 64, 32768), lambda x: x.info["workspace_bytes"] > 0),
    "triton": ("triton", (128, 128, 128), lambda x: x.info["template"] == "mm" and x.info["splits"] == 1),
    "triton split": ("triton", (64, 64, 32768), lambda x: x.info["template"] == "mm" and x.info["splits"] > 1),
    "triton swapped": ("triton", (8, 4096, 4096), lambda x: bool(x.info.get("swap_ab"))),
    "triton persistent": ("triton", (2048, 2048, 2048), lambda x: x.info["template"] == "persistent"),
    "cuda with a workspace": ("cuda", (64, 64, 8192), lambda x: x.record.workspace_bytes > 0),
    "cuda": ("cuda", (1, 4096, 4096), lambda x: x.record.workspace_bytes == 0),
    "cutlass": ("cutlass", (256, 256, 256), lambda x: True),
}
"""By kind of launch: the backend, a size, and which of its choices have it."""


def planned(name: str) -> tuple[Plan, tuple[torch.Tensor, ...]]:
    """The plan of a choice of that kind, with operands."""
    backend, size, wanted = KERNELS[name]
    problem = Problem.mm(*size, dtype=torch.bfloat16, layout="nt", device_type="cuda")
    module = load(backend)
    if not (available := module.available(detect("cuda"))).ok:
        pytest.skip(available.detail)
    found = module.enumerate(problem, detect("cuda"), Settings(search="exhaustive")).choices
    choice = next((x for x in found if wanted(x)), None)
    if choice is None:
        pytest.skip(f"no choice of {backend} is of that kind on this device")
    plan = Plan(problem=problem, choice=choice, kernel=choice.build(), origin="only choice")
    return plan, random_operands(problem, torch.device("cuda"), seed=1).tensors


@dataclasses.dataclass
class Seen:
    """Results of threads with streams of their own, each with what was read on the stream right behind the launch."""

    ours: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)
    torchs: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)
    errors: list[BaseException] = dataclasses.field(default_factory=list)


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Have so many threads do it, with the settings of this one, which those of a new thread are not."""
    threads = [threading.Thread(target=contextvars.copy_context().run, args=(work,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()


def wrong(seen: list[tuple[torch.Tensor, torch.Tensor]], want: torch.Tensor) -> str:
    """How many differ from ``want``, in words."""
    results, read = (sum(not torch.equal(pair[i], want) for pair in seen) for i in range(2))
    return f"{results} of {len(seen)} results and {read} of {len(seen)} that were read on the same stream"


@pytest.mark.parametrize("name", KERNELS)
def test_each_kind_of_launch_is_native_and_right_on_streams_in_graphs_and_threads(name: str) -> None:
    plan, tensors = planned(name)
    assert plan.kernel.prepared is not None
    want = plan.new(tensors, ())
    call = arguments("mm", *tensors)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("left to Python")

    alone = dataclasses.replace(plan, kernel=dataclasses.replace(plan.kernel, run=refuse, run_new=refuse))
    assert native.module.keep(native.generation, record_of(alone), *call)
    for _ in range(3):
        assert torch.equal(native.module.look_up(*call), want)
    out = torch.empty_like(want)
    into = arguments("mm", *tensors, out=out)
    assert native.module.keep(native.generation, record_of(alone), *into)
    assert native.module.look_up(*into) is out
    assert torch.equal(out, want)
    copies = tuple(x.clone() for x in tensors)
    assert torch.equal(native.module.look_up(*arguments("mm", *copies)), want), "at other addresses"
    torch.cuda.synchronize()  # the streams of threads do not wait for what made the operands
    first, second = tensors[:2]
    torchs, seen = torch.mm(first, second), Seen()

    def work() -> None:
        try:
            torch.cuda.synchronize()  # makes a context current to the thread, without which Python has to see to the first launch
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for _ in range(20):
                    result = native.module.look_up(*call)
                    seen.ours.append((result, result.clone()))
                    result = torch.mm(first, second)
                    seen.torchs.append((result, result.clone()))
        except BaseException as error:  # noqa: BLE001 - told by the test
            seen.errors.append(error)

    in_threads(8, work)
    assert not seen.errors
    assert wrong(seen.ours, want) == wrong(seen.torchs, torchs) == "0 of 160 results and 0 of 160 that were read on the same stream"
    assert native.module.keep(native.generation, record_of(plan), *call)  # a capture may need Python
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # type: ignore[no-untyped-call]
        captured = native.module.look_up(*call)
    captured.zero_()
    for _ in range(2):
        graph.replay()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    assert torch.equal(captured, want)


def test_results_are_memory_of_torchs_allocator() -> None:
    a, b = pair()
    with settings.patch(backends=("aten",), **QUICK):
        warmed(a, b)
        before = torch.cuda.memory_allocated()
        result = gemmtune.mm(a, b)
        assert torch.cuda.memory_allocated() - before == a.nbytes
        assert result.device == a.device
        result.resize_(256, 256)
        assert torch.cuda.memory_allocated() - before == 4 * a.nbytes
        del result
        assert torch.cuda.memory_allocated() == before


def test_scaled_products_by_cublaslt_read_the_scales_and_the_bias_of_each_call() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need sm89")
    if not (available := load("cublaslt").available(detect("cuda"))).ok:
        pytest.skip(available.detail)
    a, b = (torch.randn(128, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    b = b.t()
    with settings.patch(backends=("cublaslt",), **QUICK):
        for i in range(6):
            scales = [torch.full((), 0.5 + i + side, device="cuda") for side in (0.0, 0.25)]
            bias = torch.randn(128, device="cuda", dtype=torch.bfloat16)
            looked, native.call = native.call, None
            want = gemmtune.scaled_mm(a, b, *scales, bias=bias)
            native.call = looked
            assert torch.equal(gemmtune.scaled_mm(a, b, *scales, bias=bias), want)
        entry = found(arguments("scaled_mm", a, b, *scales, options=(False,), brought=bias, out_dtype=torch.bfloat16))
        assert entry
        assert entry.plan.kernel.prepared is not None


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
    seen = Seen()

    def work() -> None:
        with settings.patch(backends=("triton",), **QUICK), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                result = gemmtune.mm(a, b)
                seen.ours.append((result, result.clone()))

    in_threads(16, work)
    assert wrong(seen.ours, want) == "0 of 320 results and 0 of 320 that were read on the same stream"


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
