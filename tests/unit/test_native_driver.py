"""Native launches through libcuda: the driver receives the same arguments as from Python's launcher."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import random
import re
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import addmm, choice, cluster_shape, gemv_shape, mixed, wgmma_shape
from fake_libcuda import FakeCuda, compiled
from native_calls import arguments, in_place
from rotation import rotated
from torch import Tensor

from gemmtune import settings
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cuda.choice import CudaChoice
from gemmtune.backends.cutlass import launch as cutlass_launch
from gemmtune.backends.cutlass.build import CutlassChoice
from gemmtune.backends.cutlass.launch import GIVEN
from gemmtune.backends.table import load
from gemmtune.backends.triton.build import KernelChoice
from gemmtune.backends.triton.records import launch_record
from gemmtune.backends.triton.workspace import BUFFERS
from gemmtune.choice import Choice, Kernel
from gemmtune.device import preset
from gemmtune.dispatch.plan import Plan
from gemmtune.errors import ErrorFromChoice
from gemmtune.native import following, lookup
from gemmtune.native.lookup import native
from gemmtune.native.records import launch_of, record_of
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.problem.rows import following_operands, row_classes, with_rows
from gemmtune.settings import Settings
from gemmtune.toolchain import launcher as launcher_module
from gemmtune.toolchain.launcher import Launcher, Workspace, bind, prepared, workspace_of
from gemmtune.toolchain.prepared import DeviceFunction, DriverLaunch, Memory
from gemmtune.toolchain.record import OUT, A, Address, B

pytestmark = [pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"), pytest.mark.slow]
GEMV = choice(addmm(1, 100, 256), gemv_shape(8, 4, 4), pdl=True, prefetch_stages=4)
LONG = choice(addmm(136, 200, 8200), cluster_shape("64x64x64_s6_k2_2x2"), clusters_per_tile=3, pdl=True, prefetch_stages=6)
WGMMA = choice(mixed(64, 1024, 2048, scales="column"), wgmma_shape(64, 2, 1, 128, 4))

SHORT = cluster_shape("64x64x64_s6_k2_2x2")
BATCH = choice(
    Problem.bmm(3, 136, 200, 512, dtype=torch.float16, device_type="cuda"), SHORT, clusters_per_tile=1, prefetch_stages=6
)
COLUMNS = choice(Problem.mm(136, 200, 512, dtype=torch.float16, layout="tn", device_type="cuda"), SHORT, clusters_per_tile=1,
                 prefetch_stages=6)  # fmt: skip


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return compiled(tmp_path)


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    with in_place():
        yield


def plan_of(cuda: FakeCuda, one: CudaChoice) -> Plan:
    """Return the plan of a GPU choice whose launches the fake driver accepts."""
    record = one.record
    launcher = Launcher(
        cuda.driver.load(b"\x7fELF", record.kernel, 0), record, lambda reason: ErrorFromChoice("a choice", "a problem", reason)
    )
    cuda.expects_launch(record)
    workspace = workspace_of(launcher)
    run = bind(launcher, one.problem, one.name, workspace)
    kernel = Kernel(run=run, prepared=prepared(launcher, one.problem, workspace))
    return Plan(problem=one.problem, choice=one, kernel=kernel, origin="only choice")


@pytest.mark.parametrize("one", [GEMV, WGMMA, LONG], ids=lambda one: one.family.name)
def test_the_driver_receives_the_arguments_of_python(cuda: FakeCuda, one: CudaChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "kept", lambda make, *_: make())
    monkeypatch.setattr(Workspace, "_new", lambda self: torch.zeros(self.size_bytes, dtype=torch.uint8))
    plan = plan_of(cuda, one)
    operands = random_operands(one.problem, torch.device("cpu"), seed=1)
    out = torch.empty(one.problem.out.size, dtype=one.problem.out.dtype)
    call = arguments(one.problem.op, *operands.tensors, out=out, scalars=operands.scalars)
    assert native.module.keep(native.generation, record_of(plan), *call)
    for _ in range(2):
        assert native.module.look_up(*call) is out
    monkeypatch.undo()
    plan.kernel.run(out, operands.tensors, operands.scalars)
    ours, _, pythons = cuda.launched
    assert all(bytes(x.arguments) == bytes(ours.arguments) for x in cuda.launched)
    for name in ("grid", "block", "shared_bytes", "cluster", "overlaps", "attributes", "stream", "function"):
        got, wanted = getattr(ours, name), getattr(pythons, name)
        assert got == wanted or tuple(got) == tuple(wanted), name


@pytest.mark.parametrize("one", [GEMV, WGMMA, LONG, BATCH, COLUMNS], ids=["gemv", "wgmma", "cluster", "batch", "columns"])
@settings.patch(native=True)
def test_other_ms_match_python(cuda: FakeCuda, one: CudaChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, sizes, tensor maps and addresses follow M without Python."""
    memory = torch.zeros(1 << 24, dtype=torch.uint8)
    monkeypatch.setattr(launcher_module, "kept", lambda make, *_: make())
    monkeypatch.setattr(Workspace, "_new", lambda self: memory[: self.size_bytes])
    (rows_class,) = row_classes(one.problem if one is not GEMV else addmm(2, 100, 256))
    rows = rows_class.within(range(2, 9) if one is GEMV else range(40, 901))
    kernel = cuda.driver.load(b"\x7fELF", one.record.kernel, 0)

    @functools.cache
    def plan_at(m: int) -> Plan:
        at = dataclasses.replace(one, problem=with_rows(one.problem if one is not GEMV else addmm(2, 100, 256), m))
        launcher = Launcher(kernel, at.record, lambda reason: ErrorFromChoice("a choice", "a problem", reason))
        workspace = workspace_of(launcher)
        run = bind(launcher, at.problem, at.name, workspace)
        made = Kernel(run=run, prepared=prepared(launcher, at.problem, workspace))
        return Plan(problem=at.problem, choice=at, kernel=made, origin="range")

    def call_of(m: int) -> Any:
        problem = plan_at(m).problem
        operands = random_operands(problem, torch.device("cpu"), seed=m)
        out = torch.empty(problem.out.size, dtype=problem.out.dtype)
        return operands, arguments(problem.op, *operands.tensors, out=out, scalars=operands.scalars)

    cuda.expects_launch(one.record)
    bits = following_operands(rows_class)
    assert bits is not None
    assert lookup.rows_served(native.generation, call_of(rows[0])[1], bits, lambda: [lookup.Run(rows=rows, plan_at=plan_at)])
    generator = random.Random(2)
    for m in (rows[0], *(generator.choice(rows) for _ in range(6)), rows[-1]):
        operands, call = call_of(m)
        before = len(cuda.launched)
        assert native.module.look_up(*call) is call[1]
        plan_at(m).kernel.run(call[1], operands.tensors, operands.scalars)
        ours, pythons = cuda.launched[before:]
        assert bytes(ours.arguments) == bytes(pythons.arguments)
        assert [*ours.grid] == [*pythons.grid]
        assert (ours.shared_bytes, *ours.cluster) == (pythons.shared_bytes, *pythons.cluster)


FORMS = {
    "mm": Problem.mm(130, 768, 512, dtype=torch.float16, device_type="cuda"),
    "columns": Problem.mm(130, 768, 512, dtype=torch.float16, layout="tn", device_type="cuda"),
    "bmm": Problem.bmm(8, 130, 768, 512, dtype=torch.float16, device_type="cuda"),
    "baddbmm": Problem.baddbmm(8, 130, 768, 512, dtype=torch.float16, bias="mn", device_type="cuda"),
}


def of_triton(one: Choice) -> DriverLaunch:
    assert isinstance(one, KernelChoice)
    metadata = types.SimpleNamespace(name="kernel", num_warps=4, target=types.SimpleNamespace(warp_size=32), shared=0)
    return DriverLaunch(
        record=launch_record(one.record, metadata), launch=1, set_context=1, function=1, context=1, skipped=None, owner=None
    )  # fmt: skip


def of_cutlass(one: Choice) -> DeviceFunction:
    assert isinstance(one, CutlassChoice)
    planned = cutlass_launch._planned(one.config, one.problem, one._oriented, 0)
    places = {"left": 0, "right": 1, "first": 2, "count": 0, "alignment": (1, 1, 1)}
    plan = {"plan": ctypes.addressof(planned), "plan_bytes": ctypes.sizeof(planned)}
    return DeviceFunction(function=1, need=1, owner=planned, **plan, **places)  # type: ignore[arg-type]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("backend", ["triton", "cutlass"])
@pytest.mark.parametrize("form", FORMS)
def test_launch_arguments_follow_m(form: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids, sizes and strides of other Ms equal Python's, also in batches and with M as a column stride."""
    if backend == "cutlass":
        pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=132))
    device, told = preset("sm90"), of_triton if backend == "triton" else of_cutlass
    (rows_class,) = row_classes(FORMS[form])
    rows = rows_class.within(range(130, 1501))
    offered = load(backend).enumerate(FORMS[form], device, Settings(search="quick")).choices
    chosen = [x for x in offered if isinstance(x, (KernelChoice, CutlassChoice))]
    for one in chosen[:: max(len(chosen) // 3, 1)]:

        @functools.cache
        def prepared_at(m: int, one: Choice = one) -> DriverLaunch | DeviceFunction | None:
            there = one.at(rows_class.at(m), device)
            return told(there) if isinstance(there, Choice) else None

        (part,) = following.alike(prepared_at, rows)
        of_rows = following.learned(prepared_at, part)
        assert of_rows is not None
        assert of_rows.numbers
        compared = [*following.rows_to_compare(of_rows, part), *random.Random(3).sample(part, 20)]
        launch = launch_of(of_rows)
        assert not {m for m in compared if following.why_apart(prepared_at(m), of_rows, native.module.rehearse(*launch, m))}
    assert chosen


@pytest.mark.parametrize(("rows", "unit"), [(range(5, 5000), 48), (range(16, 5000, 16), 128), (range(1, 9), 1), (range(7, 8), 4)])
def test_rows_to_compare_are_ends_powers_edges_of_units_and_a_dozen_others(rows: range, unit: int) -> None:
    of_rows: Any = types.SimpleNamespace(numbers=(types.SimpleNamespace(base=rows[0], unit=unit),))
    compared, (lo, hi) = following.rows_to_compare(of_rows, rows), (rows[0], rows[-1])
    units = (hi - lo) // unit
    edges = {lo + units * part // 3 * unit + step for part in range(4) for step in (0, 1)} if unit > 1 else set()
    powers = {(1 << i) + step for i in range(13) for step in (-1, 0, 1)}
    wanted = {m for m in powers | edges | {lo, lo + 1, hi - 1, hi, rows[len(rows) // 2], *rows[:2], *rows[-2:]} if m in rows}
    others = set(compared) - wanted
    assert compared == sorted({*wanted, *others})
    assert (8 if len(rows) > 20 else 0) <= len(others) <= 12
    assert others < set(rows)


def test_a_captured_stream_is_left_to_python(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture has memory of its own, but on the stream of Inductor's trees, in whose graphs nothing may remain."""
    assert LONG.record.workspace_bytes > 0
    made: list[Tensor] = []
    placed: list[tuple[int, int]] = []

    def new(self: Workspace) -> Tensor:
        made.append(torch.zeros(self.size_bytes, dtype=torch.uint8))
        return made[-1]

    def kept(make: Callable[[], Tensor], device: int, stream: int) -> Tensor:
        placed.append((device, stream))
        return make()

    monkeypatch.setattr(Workspace, "_new", new)
    monkeypatch.setattr(launcher_module, "kept", kept)
    plan = plan_of(cuda, LONG)
    operands = random_operands(LONG.problem, torch.device("cpu"), seed=1)
    call = arguments("addmm", *operands.tensors, scalars=operands.scalars)
    assert native.module.keep(native.generation, record_of(plan), *call)
    ordered = []
    monkeypatch.setattr(launcher_module, "is_ordered", lambda *where: where in ordered)
    for captures in (0, 7, 7, 8, 0, 9):
        ctypes.c_ulonglong.in_dll(cuda.library, "fake_capture").value = captures
        ordered += [(0, 0)] * (captures == 9)
        native.module.look_up(*call)
    assert (len(made), placed) == (3, [(0, 0)]), "one for the stream, one for each capture"
    assert len(cuda.launched) == 6
    contents = [bytes(x.arguments) for x in cuda.launched]
    addresses = [x.data_ptr().to_bytes(8, "little") for x in made]
    for content, workspace in zip(contents, (0, 1, 1, 2, 0, 0), strict=True):
        assert [address in content for address in addresses] == [i == workspace for i in range(3)]


def test_a_map_is_encoded_once_for_each_address(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(cuda, WGMMA)
    prepared: Any = plan.kernel.prepared
    asked: list[tuple[int, int]] = []

    def encode(number: int, address: int) -> bytes:
        asked.append((number, address))
        if len(asked) > 3 * len(prepared.maps):
            raise ErrorFromChoice("a choice", "a problem", "an operand cannot be described to TMA")
        return bytes(prepared.encode(number, address))

    kernel = dataclasses.replace(plan.kernel, prepared=dataclasses.replace(prepared, encode=encode))
    plan = dataclasses.replace(plan, kernel=kernel)
    assert prepared.maps
    sets = [random_operands(WGMMA.problem, torch.device("cpu"), seed=i).tensors for i in range(4)]
    calls = [arguments(WGMMA.problem.op, *tensors) for tensors in sets]
    assert native.module.keep(native.generation, record_of(plan), *calls[0])
    for call in (*calls[:3], *calls[:3]):
        native.module.look_up(*call)
    assert len(asked) == len(set(asked)) == 3 * len(prepared.maps)
    native.module.look_up(*calls[3])
    assert len(asked) == 3 * len(prepared.maps) + 1, "Python was asked, refused, and did the call itself"
    assert len(cuda.launched) == 7


class Given(ctypes.Structure):
    """The argument block of ``gemmtune_call``."""

    _fields_ = [
        ("stream", ctypes.c_void_p), ("out", ctypes.c_void_p), ("left", ctypes.c_void_p), ("right", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p), ("alpha", ctypes.c_double), ("beta", ctypes.c_double), ("x", ctypes.c_void_p * 2),
    ]  # fmt: skip


@pytest.mark.parametrize("swapped", [False, True])
def test_a_function_of_nvcc_receives_its_block(cuda: FakeCuda, swapped: bool) -> None:
    assert struct.calcsize(f"{GIVEN}2P") == ctypes.sizeof(Given)
    problem = Problem.addmm(4, 8, 16, alpha=2, beta=0.5, dtype=torch.float32)
    told: list[tuple[int, Any]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Given))  # type: ignore[untyped-decorator]
    def function(plan: int, given: Any) -> int:
        told.append((plan, Given.from_buffer_copy(given.contents)))
        return 0

    memory = torch.zeros(64)
    prepared = DeviceFunction(
        function=ctypes.cast(function, ctypes.c_void_p).value or 0, plan=1234, left=int(swapped), right=int(not swapped), first=2,
        count=1, alignment=(16, 16, 16), owner=function,
        memory=Memory(tensors=lambda stream: (memory,), capture=cuda.driver.capture_info, size_bytes=256), need=0, plan_bytes=0,
    )  # fmt: skip
    by_python: list[int] = []
    kernel = Kernel(run=lambda out, tensors, scalars: by_python.append(1), prepared=prepared)
    plan = Plan(problem=problem, choice=GEMV, kernel=kernel, origin="only choice")
    a, b, inp, out = torch.ones(4, 16), torch.ones(16, 8), torch.ones(8), torch.ones(4, 8)
    call = arguments("addmm", a, b, inp, out=out, scalars=(2, 0.5))
    assert native.module.keep(native.generation, record_of(plan), *call)
    assert native.module.look_up(*call) is out
    ((where, given),) = told
    assert where == 1234
    left, right = (b, a) if swapped else (a, b)
    got = (given.out, given.left, given.right, given.workspace, given.x[0], given.alpha, given.beta, given.stream)
    assert got == (*(x.data_ptr() for x in (out, left, right, memory, inp)), 2.0, 0.5, None)
    strict = dataclasses.replace(kernel, prepared=dataclasses.replace(prepared, alignment=(16, 16, 1 << 40)))
    assert native.module.keep(native.generation, record_of(dataclasses.replace(plan, kernel=strict)), *call)
    assert native.module.look_up(*call) is out
    assert (len(told), by_python) == (1, [1]), "what is not aligned as planned is Python's"


def test_python_reports_driver_errors(cuda: FakeCuda) -> None:
    plan = plan_of(cuda, GEMV)
    operands = random_operands(GEMV.problem, torch.device("cpu"), seed=1)
    call = arguments("addmm", *operands.tensors, scalars=operands.scalars)
    assert native.module.keep(native.generation, record_of(plan), *call)
    cuda.library.fake_fail(700)
    with pytest.raises(ErrorFromChoice, match="as the driver says it"):
        native.module.look_up(*call)


BF16 = torch.bfloat16
TRITON: dict[str, tuple[Problem, Callable[[KernelChoice], bool]]] = {
    "scalars": (
        Problem.addmm(200, 120, 72, dtype=BF16, alpha=2, beta=0.5, device_type="cuda"),
        lambda x: not x.record.buffers and not described(x),
    ),
    "doubles": (Problem.addmm(64, 64, 64, dtype=torch.float64, alpha=2, beta=0.5, device_type="cuda"), lambda x: x.record.doubles),
    "buffers": (Problem.mm(64, 64, 32768, dtype=BF16, device_type="cuda"), lambda x: x.record.buffers is not None),
    "descriptors": (Problem.mm(2048, 2048, 2048, dtype=BF16, device_type="cuda"), lambda x: len(described(x)) == 3),
}
"""By what a kernel has that others do not: a problem, and which of its choices have it."""


def described(one: KernelChoice) -> list[int]:
    return [place for place, how in one.record.operands if how is not None]


@pytest.mark.turn(0, 8)
@pytest.mark.parametrize("name", rotated(list(TRITON), 2, "parameters"))
def test_triton_kernels_have_the_parameters_that_a_launch_fills(name: str) -> None:
    problem, wanted = TRITON[name]
    found = load("triton").enumerate(problem, preset("sm90"), Settings(search="exhaustive")).choices
    one = next(x for x in found if isinstance(x, KernelChoice) and wanted(x))
    made = one.kernels[0].compile()
    record = launch_record(one.record, made.metadata)
    entry = re.search(r"\.entry \w+\((.*?)\)", made.asm["ptx"], re.DOTALL)
    assert entry is not None
    types_ = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)(?: \.ptr[^,]*?)? \w+_param_\d+(\[\d+\])?", entry[1])
    expected: list[tuple[str, str]] = []
    for _, how in one.record.operands:
        expected += [("u64", "")] if how is None else [("b8", "[128]"), *[("u32", "")] * 2, *[("u64", "")] * 2]
    expected += [("f64" if one.record.doubles else "f32", "")] * len(one.record.scalars)
    assert types_[: len(expected)] == expected
    assert {kind for kind, _ in types_[len(expected) : -2]} <= {"u32", "u64"}
    assert types_[-2:] == [("u64", "")] * 2
    assert len(types_) == len(record.arguments)
    maps = len(described(one))
    assert [x for x in record.arguments if x < 128 * maps] == [128 * i for i in range(maps)]
    assert sorted(x for x in record.arguments if x >= 128 * maps) == list(range(128 * maps, len(record.parameters), 8))
    assert record.threads == made.metadata.num_warps * 32
    assert record.shared_bytes == made.metadata.shared
    behind = A + len(problem.operands)  # the numbers of buffers
    assert {x.operand for x in record.addresses} <= {OUT, *range(A, behind + len(BUFFERS) * (one.record.buffers is not None))}


def test_swapped_operands_take_each_others_place() -> None:
    record = dataclasses.replace(GEMV.record, addresses=tuple(Address(offset=8 * i, operand=i) for i in (OUT, A, B, B + 1)))
    launch = DriverLaunch(
        record=record, launch=1, set_context=1, function=1, context=1, skipped=None, owner=None, maps=(B, OUT, A)
    )  # fmt: skip
    swapped = launch.swapped()
    assert [x.operand for x in swapped.record.addresses] == [OUT, B, A, B + 1]
    assert [x.offset for x in swapped.record.addresses] == [x.offset for x in record.addresses]
    assert swapped.maps == (A, OUT, B)


_AS_TRITON = """
import os, sys
sys.path.insert(0, sys.argv[1])
sys.setdlopenflags(os.RTLD_LAZY)  # the fake has not all that the module may call
import triton, torch
from triton.backends.nvidia import driver
utils = driver.CudaUtils()
from types import SimpleNamespace
import gemmtune.backends.triton.descriptors as descriptors
triton.runtime.driver.set_active(SimpleNamespace(utils=utils))
from gemmtune.problem import Layout
from fake_libcuda import Map
layout = Layout.contiguous((256, 96), torch.bfloat16)
meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64], "fp4_padded": False}
encode = descriptors.encoder(descriptors.Description.of(layout, (128, 64)), meta)
one, *rest = encode(0x7f0000001000)
assert rest == [256, 96, 96, 1], rest
told = Map.from_buffer_copy(descriptors.encoded_bytes(one))
assert told.address == 0x7f0000001000, hex(told.address)
assert list(told.sizes[:2]) == [96, 256] and told.pitches[0] == 192 and list(told.box[:2]) == [64, 128]
assert (told.rank, told.swizzle) == (2, 3)
"""


@pytest.mark.turn(6, 8)
def test_the_bytes_of_tritons_own_descriptors_are_found(cuda: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(tmp_path / "libcuda.so")
    environment = os.environ | {
        "TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "LD_PRELOAD": str(tmp_path / "libcuda.so.1"),
    }  # fmt: skip
    command = [sys.executable, "-c", _AS_TRITON, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
