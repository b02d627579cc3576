"""Launches by the native look-up through libcuda: the driver gets from it what it gets from Python's launcher."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_cases import addmm, choice, cluster_shape, gemv_shape, mixed, wgmma_shape
from fake_libcuda import FakeCuda, compiled
from native_calls import arguments

from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.table import load
from gemmtune.backends.triton.build import TritonChoice
from gemmtune.backends.triton.launch import launch_record
from gemmtune.choice import Kernel
from gemmtune.device import preset
from gemmtune.dispatch.plan import Plan
from gemmtune.errors import ErrorFromChoice
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.native.records import record_of
from gemmtune.numerics.operands import random_operands
from gemmtune.ops import operate as path
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.launcher import Launcher, bind, prepared

pytestmark = [pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"), pytest.mark.slow]
GEMV = choice(addmm(1, 100, 256), gemv_shape(8, 4, 4), pdl=True, prefetch_stages=4)
LONG = choice(addmm(136, 200, 8200), cluster_shape("64x64x64_s6_k2_2x2"), clusters_per_tile=3, pdl=True, prefetch_stages=6)
WGMMA = choice(mixed(64, 1024, 2048, scales="column"), wgmma_shape(64, 2, 1, 128, 4))


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return compiled(tmp_path)


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    native.begun = False
    lookup.load(path.FOR_NATIVE)
    yield
    native.call, native.layer, native.begun = None, None, True
    lookup.forget(native.generation)


def plan_of(cuda: FakeCuda, one: CudaChoice) -> Plan:
    """The plan of a choice for a GPU, whose launches the fake takes."""
    record = one.record
    launcher = Launcher(
        cuda.driver.load(b"\x7fELF", record.kernel, 0), record, lambda reason: ErrorFromChoice("a choice", "a problem", reason)
    )
    cuda.expects_launch(record)
    kernel = Kernel(run=bind(launcher, one.problem, one.name), prepared=prepared(launcher, one.problem))
    return Plan(problem=one.problem, choice=one, kernel=kernel, origin="only choice")


@pytest.mark.parametrize("one", [GEMV, WGMMA], ids=lambda one: one.family.name)
def test_the_driver_gets_what_python_gives_it(cuda: FakeCuda, one: CudaChoice) -> None:
    assert one.record.workspace_bytes == 0
    plan = plan_of(cuda, one)
    operands = random_operands(one.problem, torch.device("cpu"), seed=1)
    out = torch.empty(one.problem.out.size, dtype=one.problem.out.dtype)
    call = arguments(one.problem.op, *operands.tensors, out=out, scalars=operands.scalars)
    assert native.module.keep(native.generation, record_of(plan), *call)
    assert native.module.look_up(*call) is out
    addresses = (out.data_ptr(), 0, *(x.data_ptr() for x in operands.tensors))
    plan.kernel.prepared.owner.launch(0, addresses, *(operands.scalars or (1.0, 0.0)))  # type: ignore[union-attr, attr-defined]
    ours, pythons = cuda.launched
    for name in ("grid", "block", "shared_bytes", "cluster", "overlaps", "attributes", "stream", "function"):
        got, wanted = getattr(ours, name), getattr(pythons, name)
        assert got == wanted or tuple(got) == tuple(wanted), name
    assert bytes(ours.arguments) == bytes(pythons.arguments)


def test_what_the_driver_refuses_is_said_by_python(cuda: FakeCuda) -> None:
    plan = plan_of(cuda, GEMV)
    operands = random_operands(GEMV.problem, torch.device("cpu"), seed=1)
    call = arguments("addmm", *operands.tensors, scalars=operands.scalars)
    assert native.module.keep(native.generation, record_of(plan), *call)
    cuda.library.fake_fail(700)
    with pytest.raises(ErrorFromChoice, match="as the driver says it"):
        native.module.look_up(*call)


def test_a_workspace_is_left_to_python() -> None:
    launcher = types.SimpleNamespace(record=LONG.record)
    assert LONG.record.workspace_bytes > 0
    assert prepared(launcher, LONG.problem) is None  # type: ignore[arg-type]


def test_triton_kernels_have_the_parameters_that_a_launch_fills() -> None:
    problem = Problem.addmm(200, 120, 72, dtype=torch.bfloat16, alpha=2, beta=0.5, device_type="cuda")
    found = load("triton").enumerate(problem, preset("sm90"), Settings(search="quick", max_profiling_configs=1)).choices
    one = next(
        x for x in found if isinstance(x, TritonChoice) and not x.record.buffers and not any(d for _, d in x.record.operands)
    )
    made = one.kernels[0].compile()
    record = launch_record(one.record, made.metadata)
    entry = re.search(r"\.entry \w+\((.*?)\)", made.asm["ptx"], re.DOTALL)
    assert entry is not None
    types_ = re.findall(r"\.param \.(\w+)", entry[1])
    pointers, scalars = len(record.addresses), len(record.scalars)
    assert len(types_) == len(record.arguments)
    assert types_[:pointers] == ["u64"] * pointers
    assert types_[pointers : pointers + scalars] == ["f32"] * scalars
    assert set(types_[pointers + scalars : -2]) <= {"u32", "u64"}
    assert types_[-2:] == ["u64"] * 2
    assert record.threads == made.metadata.num_warps * 32
    assert record.shared_bytes == made.metadata.shared
