"""Launches through HIP's module interface: a fake runtime with HIP's own types receives what the record describes."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_libamdhip64 import FakeHip, Launched, compiled

from gemmtune.backends.ck import BACKEND
from gemmtune.backends.ck.choice import CkChoice
from gemmtune.backends.triton import workspace
from gemmtune.device import preset
from gemmtune.errors import ErrorFromChoice, UnavailableError
from gemmtune.problem import Layout, Problem
from gemmtune.problem.trace import trace
from gemmtune.settings import Settings
from gemmtune.toolchain import hip as hip_module
from gemmtune.toolchain import launcher as launcher_module
from gemmtune.toolchain.hip import Hip, HipLauncher, loaded_hip_kernel
from gemmtune.toolchain.launcher import bind
from gemmtune.toolchain.made_once import DamagedError
from gemmtune.toolchain.record import Record

ADDRESSES = tuple(0x7F0000000000 + i * 0x10000000 for i in range(8))
OUT_AT, _, A_AT, B_AT, X_AT, Y_AT, *_ = ADDRESSES


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("hip"))


@pytest.fixture
def fake(library: Path, tmp_path: Path) -> FakeHip:
    return FakeHip.of(library, tmp_path)


def choice(problem: Problem, allow: str | None = None) -> CkChoice:
    found = BACKEND.enumerate(problem, preset("gfx942"), Settings(choice_allowlist_regex=allow)).choices[0]
    assert isinstance(found, CkChoice)
    return found


def launcher(fake: FakeHip, record: Record, device: int = 0) -> HipLauncher:
    kernel = fake.hip.load(b"\x7fELF", record.kernel, device)
    return HipLauncher(kernel, record, lambda reason: ErrorFromChoice("a choice", "a problem", reason))


def launch(fake: FakeHip, problem: Problem, allow: str | None = None) -> Launched:
    launcher(fake, choice(problem, allow).record).launch(7, ADDRESSES, 1.5, 2.5)
    return fake.launched[-1]


def mm(m: int = 300, n: int = 520, k: int = 1000, **options: object) -> Problem:
    return Problem.mm(m, n, k, device_type="cuda", **options)


def test_the_runtime_receives_the_record(fake: FakeHip) -> None:
    got = launch(fake, mm(), "_128x128x64_x32_w2x2_v3_.*_full$")
    assert (tuple(got.grid), tuple(got.block), got.shared_bytes) == ((3 * 5, 1, 1), (256, 1, 1), 0)
    assert (got.stream, got.extra, got.function % 100) == (7, 0, len("gemmtune_ck"))
    work = got.work
    assert (work.a, work.b, work.out) == (A_AT, B_AT, OUT_AT)
    assert (work.m, work.n, work.k) == (300, 520, 1000)
    assert (work.a_stride, work.b_stride, work.out_stride) == (1000, 1000, 520)
    assert (work.alpha, work.beta) == (0.0, 0.0)  # neither is read


@pytest.mark.parametrize(
    ("layout", "strides"), [("nn", (1000, 520)), ("nt", (1000, 1000)), ("tn", (300, 520)), ("tt", (300, 1000))]
)
def test_strides_are_between_the_lines_that_are_contiguous(fake: FakeHip, layout: str, strides: tuple[int, int]) -> None:
    work = launch(fake, mm(layout=layout)).work
    assert (work.a_stride, work.b_stride) == strides


def test_batches_have_a_product_for_each_z(fake: FakeHip) -> None:
    problem = Problem.baddbmm(5, 64, 96, 256, alpha=2.0, beta=0.5, device_type="cuda")
    got = launch(fake, problem)
    assert got.grid[2] == 5
    work = got.work
    assert (work.a_batch_stride, work.b_batch_stride, work.out_batch_stride) == (64 * 256, 256 * 96, 64 * 96)
    assert (work.x[0].data, work.x[0].stride, work.x[0].batch_stride) == (X_AT, 96, 64 * 96)
    assert (work.alpha, work.beta) == (1.5, 2.5)
    shared = dataclasses.replace(problem, a=dataclasses.replace(problem.a, stride=(0, 256, 1)))
    assert launch(fake, shared).work.a_batch_stride == 0


def test_a_column_major_result_exchanges_a_and_b(fake: FakeHip) -> None:
    problem = dataclasses.replace(mm(), out=dataclasses.replace(mm().out, stride=(1, 300)))
    work = launch(fake, problem).work
    assert (work.a, work.b, work.out) == (B_AT, A_AT, OUT_AT)
    assert (work.m, work.n, work.out_stride) == (520, 300, 300)


def test_parts_of_k_have_a_row_of_blocks_each_and_a_workspace(fake: FakeHip) -> None:
    problem = Problem.baddbmm(3, 100, 120, 1000, layout="nn", device_type="cuda")
    made = choice(problem, "_64x64x64_x32_w2x2_v1_intrawave.*_k4")
    got = launch(fake, problem, "_64x64x64_x32_w2x2_v1_intrawave.*_k4")
    assert made.claims.splits == 4
    assert tuple(got.grid) == (2 * 2, 4, 3)
    # A counter for each tile, in whole lines, and then the sums of each part.
    work, memory = got.work, ADDRESSES[1]
    assert (work.counters, work.partials, work.part_k) == (memory, memory + 256, 4 * 64)
    assert made.record.workspace_bytes == 256 + 4 * 3 * 4 * 100 * 120
    whole = launch(fake, problem, "_64x64x64_x32_w2x2_v1_intrawave.*_mnk_full$").work
    assert (whole.counters, whole.partials) == (None, None)


def test_scales_and_operands_of_an_epilogue_follow_each_other(fake: FakeHip) -> None:
    product = Problem.scaled_mm(256, 512, 1024, scales="row", device_type="cuda")
    bias = torch.empty(512, dtype=torch.bfloat16, device="meta")
    fused = dataclasses.replace(product, epilogue=trace(lambda acc, x: acc + x, product.accumulator, (bias,)))
    work = launch(fake, fused).work
    assert [(work.x[i].data, work.x[i].stride) for i in range(3)] == [(X_AT, 0), (Y_AT, 0), (ADDRESSES[6], 0)]


def test_cached_launches_are_independent(fake: FakeHip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "MOST_READY", 3)
    one = launcher(fake, choice(Problem.addmm(64, 96, 256, alpha=2.0, device_type="cuda")).record)
    asked = [
        (s, OUT_AT + 256 * i, alpha)
        for s, i, alpha in ((1, 0, 1.0), (2, 0, 1.0), (1, 1, 1.0), (1, 0, 2.0), (3, 4, 6.0), (1, 0, 1.0))
    ]
    for stream, out, alpha in asked:
        one.launch(stream, (out, *ADDRESSES[1:]), alpha, 1.0)
    assert [(got.stream, got.work.out, got.work.alpha) for got in fake.launched] == asked


def test_loading_restores_the_current_device(fake: FakeHip) -> None:
    fake.library.hipSetDevice(1)
    kernel = fake.hip.load(b"\x7fELF", "gemmtune_ck", 3)
    assert kernel.function // 100 % 1000 == 3
    assert fake.library.fake_device() == 1
    fake.refuses("hipModuleGetFunction")
    with pytest.raises(UnavailableError, match="HIP error 719: out of order"):
        fake.hip.load(b"\x7fELF", "gemmtune_ck", 3)
    assert fake.library.fake_device() == 1


def test_a_kernel_is_loaded_once(fake: FakeHip, tmp_path: Path) -> None:
    path = tmp_path / "one.hsaco"
    path.write_bytes(b"\x7fELF")
    assert loaded_hip_kernel(fake.hip, path, "k", 0) is loaded_hip_kernel(fake.hip, path, "k", 0)
    assert loaded_hip_kernel(fake.hip, path, "k", 1).device == 1
    assert fake.library.fake_modules() == 2


def test_any_thread_may_launch(fake: FakeHip) -> None:
    one = launcher(fake, choice(mm()).record)
    thread = threading.Thread(target=one.launch, args=(7, ADDRESSES, 1.0, 0.0))
    thread.start()
    thread.join()
    assert len(fake.launched) == 1


def test_runtime_errors_are_reported(fake: FakeHip) -> None:
    one = launcher(fake, choice(mm()).record)
    fake.refuses("hipModuleLaunchKernel")
    with pytest.raises(ErrorFromChoice, match="HIP error 719: out of order"):
        one.launch(7, ADDRESSES, 1.0, 0.0)
    with pytest.raises(DamagedError, match="the HIP runtime: HIP error 200: device kernel image is invalid"):
        fake.hip.load(b"no code object", "k", 0)


def test_a_bound_kernel_launches_on_the_current_stream(fake: FakeHip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 40 + device, raising=False)
    problem = Problem.addmm(64, 96, 256, alpha=2.0, beta=0, bias="n", device_type="cuda")
    one = choice(problem)
    run = bind(launcher(fake, one.record, device=2), problem, one.name)
    operands = [torch.empty_strided(x.size, x.stride, dtype=x.dtype) for _, x in problem.operands]
    roles = [role for role, _ in problem.operands]
    out = torch.empty_strided(problem.out.size, problem.out.stride, dtype=problem.out.dtype)
    run(out, tuple(operands), (3.0, 0.0))
    (got,) = fake.launched
    a, b = operands[roles.index("a")], operands[roles.index("b")]
    assert (got.stream, got.work.alpha, got.work.a, got.work.b) == (42, 3.0, a.data_ptr(), b.data_ptr())
    beside = torch.empty(a.numel() + 1, dtype=a.dtype)[1:].view_as(a) if a.is_contiguous() else a
    moved = tuple(beside if role == "a" else x for role, x in zip(roles, operands, strict=True))
    with pytest.raises(ErrorFromChoice, match="an operand is not aligned as planned"):
        run(out, moved, (3.0, 0.0))


def test_rejects_a_runtime_without_a_function() -> None:
    with pytest.raises(UnavailableError, match="libamdhip64: got a library without hipGetDevice"):
        Hip(SimpleNamespace())


def test_reports_a_missing_runtime_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_module, "LIBRARIES", ("libamdhip64-that-is-not-here.so",))
    hip_module.find_hip.cache_clear()
    with pytest.raises(UnavailableError, match=r"the HIP runtime cannot be loaded: .*install ROCm, or torch for ROCm"):
        hip_module.find_hip()
    hip_module.find_hip.cache_clear()


def test_prefers_the_runtime_of_torch(fake: FakeHip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    fake.path.rename(tmp_path / "lib" / "libamdhip64.so")
    monkeypatch.setattr(hip_module.torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(hip_module, "LIBRARIES", ())
    hip_module.find_hip.cache_clear()
    assert hip_module.find_hip().call._name == str(tmp_path / "lib" / "libamdhip64.so")
    hip_module.find_hip.cache_clear()


def test_tritons_workspace_knows_the_capture_of_a_stream(fake: FakeHip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(workspace, "find_hip", lambda: fake.hip)
    assert workspace._capture_id(7) == 0
    ctypes.c_ulonglong.in_dll(fake.library, "fake_capture").value = 12
    assert workspace._capture_id(7) == fake.hip.capture(7) == 12


def test_the_parameters_are_one_argument_of_the_kernel() -> None:
    record = choice(mm()).record
    assert record.arguments == (0,)
    assert (record.maps, record.workspace_bytes, record.cluster, record.pdl) == ((), 0, 1, False)
    assert len(record.parameters) == ctypes.sizeof(type(Launched().work))
    assert Layout.of(torch.empty(4)).alignment == 4
