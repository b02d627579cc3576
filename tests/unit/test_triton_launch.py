"""Composition of a launch: the grid, the order of the arguments, and Triton's launchers of several versions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gemmtune.backends.table import load
from gemmtune.backends.triton.build import KernelChoice
from gemmtune.backends.triton.configs import Config, geometry
from gemmtune.backends.triton.workspace import Buffers
from gemmtune.device import preset
from gemmtune.numerics.operands import random_operands
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.triton_kernels import Argument

pytest.importorskip("triton", reason="the launchers are Triton's")

import triton

from gemmtune.backends.triton import launch
from gemmtune.backends.triton.launch import Launcher, launcher_of
from gemmtune.backends.triton.records import Record, record_of

PROBLEM = Problem.addmm(100, 200, 300, dtype=torch.float32, alpha=2, beta=3, device_type="cuda")
GRID = (7, 2, 1)


def _compiled(calls: list[tuple[Any, ...]], **changes: Any) -> SimpleNamespace:
    """Compiled kernel whose launcher records its calls."""

    class Launcher:
        launch_cooperative_grid, launch_pdl = "coop", "as compiled"
        global_scratch_size = profile_scratch_size = 0
        arg_annotations, kernel_signature = "annotations", "signature"

        def launch(self, *args: Any) -> None:
            calls.append(("below", *args))

        def __call__(self, *args: Any) -> None:
            calls.append(("launcher", *args))

    launcher = Launcher()
    for name, value in changes.items():
        setattr(launcher, name, value)
    return SimpleNamespace(run=launcher, function="handle", packed_metadata="metadata")


def _call(how: Launcher) -> None:
    arguments: Any = (1, 2)
    values = (arguments,) if how.packed else arguments
    how.function(*how.grid, "stream", *how.middle, *values)


NONE5 = (None,) * 5
EXPECTED = {
    "3.6.0": ("below", *GRID, "stream", "handle", "coop", True, None, None, "metadata", None, None, None, 1, 2),
    "3.7.1": ("below", *GRID, "stream", "handle", "coop", True, "metadata", *NONE5, "annotations", "signature", (1, 2)),
    "3.9.0": ("below", *GRID, "stream", "handle", "coop", True, "metadata", *NONE5, "annotations", "signature", (1, 2)),
    "4.0.0": ("launcher", *GRID, "stream", "handle", "metadata", None, None, None, 1, 2),
}


@pytest.mark.parametrize("version", EXPECTED)
def test_each_version_gets_its_own_order_and_an_unknown_one_goes_through_tritons_launcher(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    calls: list[tuple[Any, ...]] = []
    _call(launcher_of(_compiled(calls), GRID, pdl=True))
    assert calls == [EXPECTED[version]]


@pytest.mark.parametrize("changes", [{"global_scratch_size": 128}, {"profile_scratch_size": 64}, {"gsan_enabled": True}], ids=str)
def test_kernels_that_need_more_go_through_tritons_launcher(changes: dict[str, Any]) -> None:
    calls: list[tuple[Any, ...]] = []
    _call(launcher_of(_compiled(calls, **changes), GRID))
    assert calls[0][0] == "launcher"


def _config(**changes: Any) -> Config:
    return replace(Config(block_m=32, block_n=64, block_k=32, stages=2, warps=4), **changes)


def test_the_grid_has_a_program_for_each_split_of_each_tile() -> None:
    where = geometry(Problem.bmm(3, 100, 200, 300, device_type="cuda"), _config(split_k=2))
    assert where.grid == (4 * 4 * 3, 2, 1)
    assert where.k_per_split == 160


@pytest.mark.parametrize(("splits", "groups"), [(2, 1), (8, 1), (9, 3), (16, 4), (30, 5), (64, 8)])
def test_many_splits_are_added_up_in_groups(splits: int, groups: int) -> None:
    where = geometry(Problem.mm(32, 64, 32 * 64 * 15, device_type="cuda"), _config(split_k=splits))
    assert (where.splits, where.groups) == (splits, groups)
    assert where.groups * where.splits_per_group >= splits > (where.groups - 1) * where.splits_per_group
    assert where.slots == splits + groups
    assert where.counters == groups + 1


def test_without_splits_there_is_no_workspace() -> None:
    where = geometry(PROBLEM, _config())
    assert (where.splits, where.slots, where.counters) == (1, 0, 0)


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    return 1003


@pytest.mark.parametrize("packed", [False, True], ids=["flat", "packed"])
def test_a_plain_product_passes_addresses_and_bound_integers(stream: int, packed: bool) -> None:
    record = _Recorder()
    how = Launcher(function=record, grid=GRID, middle=("middle",), packed=packed)
    a, b, out = (torch.zeros(4) for _ in range(3))
    run = launch._bind_plain(how, 3, (5, 6))
    run(out, (a, b), ())
    run(out, (a, b, out), (0.0, 0.0))  # addmm whose inp is not read
    values = (a.data_ptr(), b.data_ptr(), out.data_ptr(), 5, 6)
    assert record.calls == 2 * [(*GRID, stream, "middle", *((values,) if packed else values))]


@pytest.mark.parametrize("described", [(), ("a", "b", "out")], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("packed", [False, True], ids=["flat", "packed"])
def test_bias_extra_operands_and_scalars_come_in_the_signatures_order(
    stream: int, packed: bool, described: tuple[str, ...]
) -> None:
    record = _Recorder()
    how = Launcher(function=record, grid=GRID, middle=(), packed=packed)
    tensors = {name: torch.zeros(4, 4) for name in ("a", "b", "inp", "x0", "out")}
    places: tuple[tuple[int, None], ...] = tuple((place, None) for place in (1, 2, 3, 4, 0))
    launched = Record(grid=GRID, pdl=False, operands=places, scalars=(1,), constants=(9,))
    encode: Any = [(lambda address, name=name: (name, address)) if name in described else None for name in tensors]
    out = tensors.pop("out")
    launch._bind_general(how, 3, launched, encode, None)(out, tuple(tensors.values()), (2.0, 3.0))
    addresses = [((name, x.data_ptr()) if name in described else (x.data_ptr(),)) for name, x in (*tensors.items(), ("out", out))]
    values = (*itertools.chain(*addresses), 3.0, 9)
    assert record.calls == [(*GRID, stream, *((values,) if packed else values))]


def test_buffers_are_passed_by_name(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    partials, zeros = torch.zeros(3, dtype=torch.uint8), torch.zeros(9, dtype=torch.int32)
    asked: list[dict[str, int]] = []

    def workspace(**sizes: int) -> Any:
        asked.append(sizes)
        return Mock(acquire=lambda _stream: (partials, zeros))

    monkeypatch.setattr("gemmtune.backends.triton.workspace.Workspace", workspace)
    acquired = Buffers(dtype=torch.float32, partials=5, counters=3).on(1, object())(stream)
    assert asked == [{"device": 1, "size_bytes": 32, "counters": 4}], "powers of two, which several Ms share"
    assert [x.data_ptr() for x in acquired] == [partials.data_ptr(), zeros.data_ptr()]
    record, out = _Recorder(), torch.zeros(4)
    arguments = [Argument(name=name, type="", source=("pointer", name)) for name in ("b", "out", "counters", "workspace")]
    where, need = geometry(PROBLEM, _config()), Buffers(dtype=torch.float32)
    launched = record_of(arguments, PROBLEM, where, pdl=False, blocks={}, buffers=need)
    assert launched.buffers is need
    how = Launcher(function=record, grid=GRID, middle=(), packed=False)
    launch._bind_general(how, 3, launched, [None] * 4, lambda _stream: acquired)(out, (out, zeros, zeros), (2.0, 3.0))
    assert record.calls == [(*GRID, stream, *(x.data_ptr() for x in (zeros, out, acquired[1], partials)))]


PROBLEMS = {
    "mm": Problem.mm(512, 512, 512, device_type="cuda"),
    "long": Problem.mm(64, 64, 32768, device_type="cuda"),
    "unread": Problem.addmm(256, 512, 4096, bias="n", beta=0.0, device_type="cuda"),
    "row": Problem.mm(2, 4096, 4096, device_type="cuda"),
    "sum": Problem.mm_plus_mm(128, 256, 512, device_type="cuda"),
    "weights": Problem.mixed_mm(1, 4096, 4096, device_type="cuda"),
    "int8": Problem.int_mm(640, 640, 640, layout="nn", device_type="cuda"),
    "scaled": Problem.scaled_mm(128, 256, 512, device_type="cuda"),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_family_passes_its_declared_arguments(stream: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bind one choice of each family to a kernel that records its launch."""
    problem, calls = PROBLEMS[name], []
    partials, zeros = torch.zeros(4), torch.zeros(1 << 20, dtype=torch.int32)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(launch, "takes_encoded", lambda compiled, call: call)
    monkeypatch.setattr(launch, "encoder", lambda description, meta: lambda address: [("encoded", address)])
    monkeypatch.setattr("gemmtune.backends.triton.workspace.Workspace", lambda **_: Mock(acquire=lambda _stream: (partials, zeros)))
    operands = random_operands(replace(problem, device_type="cpu"), torch.device("cpu"), seed=0)
    tensors = dict(zip(("out", *(role for role, _ in problem.operands)), (operands.out, *operands.tensors), strict=True))
    offers = load("triton").enumerate(problem, preset("sm90"), Settings(search="exhaustive", deterministic=False))
    families = {type(choice): choice for choice in offers.choices if isinstance(choice, KernelChoice)}
    assert families
    for choice in families.values():
        arguments = choice.source.arguments
        known: dict[str, Any] = {"workspace": partials, "counters": zeros, **tensors}
        expected: list[Any] = []
        for argument in arguments:
            match argument.source:
                case ("pointer", operand):
                    expected.append(known[operand].data_ptr())
                case ("descriptor", operand):
                    expected.append(("encoded", known[operand].data_ptr()))
                case ("scalar", scalar):
                    expected.append(dict(zip(problem.operation.scalars, operands.scalars, strict=True))[scalar])
                case ("runtime", value):
                    expected.append(getattr(choice.where, value))
                case ("size", letter):
                    expected.append(getattr(problem, letter))
                case _:
                    expected.append(None)
        compiled = _compiled(calls)
        compiled.metadata = SimpleNamespace(tensordesc_meta=[None for argument in arguments if argument.source[0] == "descriptor"])
        choice.bind((compiled,)).run(operands.out, operands.tensors, operands.scalars)
        _, *launched = calls.pop()
        assert launched[:4] == [*choice.where.grid, stream], choice.name
        passed = launched[len(launched) - len(arguments) :]
        assert [x if y is not None else None for x, y in zip(passed, expected, strict=True)] == expected, choice.name
