"""Launches through libcuda: a fake driver with CUDA's own types receives what the record describes."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from cuda_cases import F16, INT4, addmm, choice, cluster_shape, gemv_shape, mixed, mm, skinny_shape, wgmma_shape
from fake_libcuda import FakeCuda, Launched, compiled, include_folder

from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cuda.cluster.family import Work as ClusterWork
from gemmtune.backends.cuda.gemv.family import Work as GemvWork
from gemmtune.backends.cuda.skinny.family import Work as SkinnyWork
from gemmtune.backends.cuda.wgmma.family import Work as WgmmaWork
from gemmtune.errors import ErrorFromChoice, UnavailableError
from gemmtune.toolchain import driver as driver_module
from gemmtune.toolchain import launcher as launcher_module
from gemmtune.toolchain.driver import Attribute, Config, Driver
from gemmtune.toolchain.launcher import Launcher, bind
from gemmtune.toolchain.made_once import DamagedError
from gemmtune.toolchain.record import OUT, A, Record, with_maps
from gemmtune.toolchain.structs import fields_of, struct_text

OUT_AT, WORKSPACE_AT, A_AT, B_AT, X_AT = (0x7F0000000000 + i * 0x10000000 for i in range(5))
LONG = choice(addmm(136, 200, 8200), cluster_shape("64x64x64_s6_k2_2x2"), clusters_per_tile=3, pdl=True, prefetch_stages=6)
SKINNY = choice(mixed(16, 1000, 4096, **INT4, scales="group_128"), skinny_shape(16, 128, 4, 2, 4), cluster_k=2)
GEMV = choice(addmm(1, 100, 256), gemv_shape(8, 4, 4), pdl=True, prefetch_stages=4)
WGMMA = choice(mixed(64, 1000, 4096, scales="column"), wgmma_shape(64, 2, 1, 128, 4), cluster_k=2)


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return compiled(tmp_path)


def launcher_of(cuda: FakeCuda, record: Record, device: int = 0) -> Launcher:
    kernel = cuda.driver.load(b"\x7fELF", record.kernel, device)
    cuda.expects_launch(record)
    return Launcher(kernel, record, lambda reason: ErrorFromChoice("a choice", "a problem", reason))


def addresses_of(record: Record) -> tuple[int, ...]:
    count = 1 + max(address.operand for address in record.addresses)
    return (OUT_AT, WORKSPACE_AT if record.workspace_bytes else 0, A_AT, B_AT, *(X_AT + i * 4096 for i in range(count - 4)))


def launch(cuda: FakeCuda, record: Record, stream: int = 7, alpha: float = 1.5, beta: float = 2.5) -> Launched:
    launcher_of(cuda, record).launch(stream, addresses_of(record), alpha, beta)
    return cuda.launched[-1]


@pytest.mark.parametrize("one", [LONG, GEMV, SKINNY, WGMMA], ids=lambda one: one.family.name)
def test_the_driver_receives_the_record(cuda: FakeCuda, one: CudaChoice) -> None:
    record = one.record
    got = launch(cuda, record)
    assert (tuple(got.grid), tuple(got.block), got.shared_bytes) == (record.grid, (record.threads, 1, 1), record.shared_bytes)
    assert (tuple(got.cluster), got.overlaps, got.attributes) == ((record.cluster, 1, 1), int(record.pdl), 1 + record.pdl)
    assert (got.stream, got.function) == (7, len(record.kernel))
    assert cuda.library.fake_most_shared_bytes() == record.shared_bytes
    addresses = addresses_of(record)
    for told, made in zip(record.maps, cuda.maps(got, len(record.maps)), strict=True):
        rank = len(told.sizes)
        assert (made.type, made.rank, made.address) == (told.data_type, rank, addresses[told.operand])
        assert tuple(made.sizes)[:rank] == told.sizes
        assert tuple(made.pitches)[: rank - 1] == told.pitches
        assert tuple(made.box)[:rank] == told.box
        assert (made.interleave, made.swizzle, made.promotion, made.fill) == (0, told.swizzle, told.promotion, 0)


def test_addresses_and_scalars_are_where_the_kernel_reads_them(cuda: FakeCuda) -> None:
    got = launch(cuda, LONG.record, alpha=1e300)
    work = ClusterWork.from_buffer_copy(bytes(got.arguments[1]))
    assert (work.out, work.arrivals, work.epilogue.x[0].data) == (OUT_AT, WORKSPACE_AT, X_AT)
    assert WORKSPACE_AT < work.left < work.parts < WORKSPACE_AT + LONG.record.workspace_bytes
    assert (work.epilogue.scalars.alpha, work.epilogue.scalars.beta) == (float("inf"), 2.5)
    assert (work.rows, work.cols, work.clusters_per_tile, work.prefetch_stages, work.paired) == (136, 200, 3, 6, True)
    few = SkinnyWork.from_buffer_copy(bytes(launch(cuda, SKINNY.record).arguments[1]))
    assert (few.out, few.epilogue.x[0].data, few.cluster_k, few.paired) == (OUT_AT, X_AT, 2, True)
    one = GemvWork.from_buffer_copy(bytes(launch(cuda, GEMV.record, alpha=3.0).arguments[0]))
    assert (one.out, one.a, one.b, one.epilogue.x[0].data, one.epilogue.scalars.alpha) == (OUT_AT, A_AT, B_AT, X_AT, 3.0)
    more = WgmmaWork.from_buffer_copy(bytes(launch(cuda, WGMMA.record).arguments[1]))
    assert (more.out, more.epilogue.x[0].data, more.whole_chunks, more.sums_beside) == (OUT_AT, X_AT, True, True)


def test_results_that_are_not_aligned_are_stored_one_by_one(cuda: FakeCuda) -> None:
    launcher = launcher_of(cuda, SKINNY.record)
    for moved, paired in ((0, True), (2, False), (4, True)):
        launcher.launch(7, (OUT_AT + moved, *addresses_of(SKINNY.record)[1:]), 1.0, 0.0)
        assert SkinnyWork.from_buffer_copy(bytes(cuda.launched[-1].arguments[1])).paired is paired


def test_cached_launches_are_independent(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "MOST_READY", 3)
    monkeypatch.setattr(launcher_module, "MOST_MAPS", 3)
    launcher, first = launcher_of(cuda, LONG.record), addresses_of(LONG.record)
    asked = [(stream, OUT_AT + 256 * i, A_AT + 512 * j, alpha) for stream, i, j, alpha in (
        (1, 0, 0, 1.0), (2, 0, 0, 1.0), (1, 1, 0, 1.0), (1, 0, 1, 1.0), (1, 0, 0, 2.0), (1, 0, 0, 1.0), (3, 4, 5, 6.0),
        (1, 0, 0, 1.0),
    )]  # fmt: skip
    for stream, out, a, alpha in asked:
        launcher.launch(stream, (out, first[1], a, *first[3:]), alpha, 0.0)
    works = [ClusterWork.from_buffer_copy(bytes(got.arguments[1])) for got in cuda.launched]
    read = [cuda.maps(got, 2)[0].address for got in cuda.launched]
    seen = [(got.stream, w.out, a, w.epilogue.scalars.alpha) for got, w, a in zip(cuda.launched, works, read, strict=True)]
    assert seen == asked


def test_a_launch_may_be_a_threads_first_use_of_cuda(cuda: FakeCuda) -> None:
    launcher = launcher_of(cuda, SKINNY.record, device=1)
    for _ in range(2):
        thread = threading.Thread(target=launcher.launch, args=(7, addresses_of(SKINNY.record), 1.0, 0.0))
        thread.start()
        thread.join()
    assert cuda.library.fake_count() == 2


def test_driver_errors_are_reported(cuda: FakeCuda) -> None:
    launcher = launcher_of(cuda, SKINNY.record)
    cuda.library.fake_fail(719)
    with pytest.raises(ErrorFromChoice, match="CUDA error 719: as the driver says it\n  from choice a choice"):
        launcher.launch(7, addresses_of(SKINNY.record), 1.0, 0.0)
    with pytest.raises(ErrorFromChoice, match="an operand cannot be described to TMA: CUDA error 1"):
        launcher.launch(7, (OUT_AT, 0, A_AT + 2, B_AT, X_AT), 1.0, 0.0)
    with pytest.raises(ErrorFromChoice, match="CUDA error 1"):
        launcher_of(cuda, dataclasses.replace(SKINNY.record, shared_bytes=228 * 1024))
    with pytest.raises(DamagedError, match="the CUDA driver: CUDA error 200"):
        cuda.driver.load(b"text", "kernel", 0)


def test_contexts_are_retained_once_and_memory_only_grows(cuda: FakeCuda) -> None:
    small, large = (choice(SKINNY.problem, SKINNY.config.shape, cluster_k=n).record for n in (1, 2))
    kernel = cuda.driver.load(b"\x7fELF", small.kernel, 3)
    for record in (small, large, small):
        assert kernel.require(record.shared_bytes) == 0
    assert cuda.library.fake_most_shared_bytes() == large.shared_bytes
    cuda.driver.load(b"\x7fELF", small.kernel, 3)
    assert (cuda.library.fake_contexts(), cuda.library.fake_modules(), kernel.context) == (1, 2, 1043)


def test_a_captured_stream_has_a_number(cuda: FakeCuda) -> None:
    assert cuda.driver.capture(5) == 0
    ctypes.c_ulonglong.in_dll(cuda.library, "fake_capture").value = 9
    assert cuda.driver.capture(5) == 9


@pytest.mark.parametrize("with_inp", [False, True])
def test_a_call_passes_its_operands_in_order(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, with_inp: bool) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11 + device, raising=False)
    problem = addmm(64, 64, 512) if with_inp else mm(64, 64, 512, dtype=F16)
    one = choice(problem, cluster_shape("64x64x64_s12_k2"))
    run = bind(launcher_of(cuda, one.record, device=2), problem, "a choice")
    out, a, b, inp = (torch.zeros(size, dtype=F16) for size in ((64, 64), (64, 512), (64, 512), (64,)))
    read = (inp,) if with_inp else ()
    run(out, (a, b.t(), *read), (2.0, 0.5) if with_inp else ())
    [got] = cuda.launched
    work = ClusterWork.from_buffer_copy(bytes(got.arguments[1]))
    assert (got.stream, work.out) == (13, out.data_ptr())
    assert [one.address for one in cuda.maps(got, 2)] == [a.data_ptr(), b.data_ptr()]
    assert work.epilogue.x[0].data == (inp.data_ptr() if with_inp else None)
    moved = torch.zeros(64 * 512 + 1, dtype=F16)[1:].view(64, 512)
    with pytest.raises(ErrorFromChoice, match="an operand is not aligned as planned: 0x"):
        run(out, (moved, b.t(), *read), (2.0, 0.5))


def test_rejects_a_driver_without_a_function() -> None:
    class Old:
        pass

    with pytest.raises(UnavailableError, match=r"libcuda: got a driver without cuInit, expected CUDA 12.3 or newer"):
        Driver(Old())


def test_reports_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", missing)
    driver_module.find_driver.cache_clear()
    with pytest.raises(UnavailableError, match=r"the CUDA driver cannot be loaded: libcuda\.so\.1"):
        driver_module.find_driver()


def test_maps_come_before_the_other_arguments() -> None:
    bare = dataclasses.replace(SKINNY.record, maps=(), parameters=bytes(8), arguments=(0,))
    record = with_maps(dataclasses.replace(bare, addresses=()), SKINNY.record.maps)
    assert (len(record.parameters), record.arguments) == (3 * 128 + 8, (0, 3 * 128))
    assert {address.operand for address in SKINNY.record.addresses} >= {OUT}
    assert SKINNY.record.maps[0].operand == A


STRUCTS = [ClusterWork, GemvWork, SkinnyWork, WgmmaWork]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__module__.split(".")[-2])
def test_kernel_structs_match_the_filled_structs(struct: type[ctypes.Structure], tmp_path: Path) -> None:
    from gemmtune.backends.cuda.kernel import structs_of

    names = [name for name, _ in fields_of(struct)]
    prints = "\n".join(f'  std::printf("{name} %zu %zu\\n", offsetof(Work, {name}), sizeof(Work::{name}));' for name in names)
    source, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    source.write_text(f"#include <cstddef>\n#include <cstdio>\n{structs_of(struct, {})}\nint main() {{\n{prints}\n}}\n")
    subprocess.run(["g++", "-std=c++17", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == [f"{name} {getattr(struct, name).offset} {getattr(struct, name).size}" for name in names]


@pytest.mark.skipif(shutil.which("g++") is None or include_folder() is None, reason="needs g++ and cuda.h")
def test_driver_structs_match_the_header(tmp_path: Path) -> None:
    told = {
        "sizeof(CUlaunchConfig)": ctypes.sizeof(Config), "offsetof(CUlaunchConfig, hStream)": Config.stream.offset,
        "offsetof(CUlaunchConfig, attrs)": Config.attributes.offset,
        "offsetof(CUlaunchConfig, numAttrs)": Config.attribute_count.offset,
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(Attribute), "offsetof(CUlaunchAttribute, value)": Attribute.value.offset,
        "sizeof(CUtensorMap)": 128, "int(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)": driver_module.CLUSTER_DIMENSION,
        "int(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)": driver_module.PROGRAMMATIC_STREAM_SERIALIZATION,
        "int(CUDA_ERROR_INVALID_CONTEXT)": driver_module.INVALID_CONTEXT, "int(CU_TENSOR_MAP_DATA_TYPE_UINT8)": 0,
        "int(CU_TENSOR_MAP_DATA_TYPE_FLOAT16)": 6, "int(CU_TENSOR_MAP_DATA_TYPE_FLOAT32)": 7,
        "int(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)": 9, "int(CU_TENSOR_MAP_SWIZZLE_64B)": 2, "int(CU_TENSOR_MAP_SWIZZLE_128B)": 3,
        "int(CU_TENSOR_MAP_L2_PROMOTION_L2_128B)": 2, "int(CU_TENSOR_MAP_L2_PROMOTION_L2_256B)": 3,
    }  # fmt: skip
    asserts = "\n".join(f"static_assert({name} == {number});" for name, number in told.items())
    source = tmp_path / "header.cpp"
    source.write_text(f"#include <cstddef>\n#include <cuda.h>\n{asserts}\n")
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", f"-I{include_folder()}", str(source)], check=True)


def test_a_struct_in_cpp_has_arrays_and_other_structs() -> None:
    class Inner(ctypes.Structure):
        _fields_ = [("x", ctypes.c_float * 3)]

    class Outer(ctypes.Structure):
        _fields_ = [("at", ctypes.c_void_p), ("to", ctypes.c_void_p), ("inner", Inner * 2)]

    lines = struct_text(Outer, {"to": "bf16*"}, name="Work").splitlines()
    assert lines[1:4] == ["  void const* at;", "  bf16* to;", "  Inner inner[2];"]
    assert lines[-1] == 'static_assert(sizeof(Work) == 40, "the caller fills it");'
