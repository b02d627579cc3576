"""Native products through cublasLtMatmul: a fake library on CPU memory receives the same arguments as from Python."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cublaslt import Fake, installed
from native_calls import Arguments, arguments, in_place

from gemmtune import settings
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cublaslt import BACKEND, launch, library
from gemmtune.device import preset
from gemmtune.dispatch.plan import Plan
from gemmtune.native import lookup
from gemmtune.native.lookup import native
from gemmtune.native.records import record_of
from gemmtune.numerics.operands import random_operands
from gemmtune.ops import operate as path
from gemmtune.problem import Layout, Problem
from gemmtune.problem.fused import bias_epilogue
from gemmtune.problem.rows import following_operands, row_classes, with_rows
from gemmtune.settings import Settings
from gemmtune.toolchain.prepared import LibraryProduct

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
DEVICE, STREAM = preset("sm90"), 0
F32, F16 = torch.float32, torch.float16


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with in_place():
        yield installed(monkeypatch, DEVICE, STREAM)  # type: ignore[no-untyped-call]
    library.handle.cache_clear()


def biased(problem: Problem) -> Problem:
    return dataclasses.replace(problem, epilogue=bias_epilogue((problem.n,), problem.out.dtype))


def scaled(**fields: Any) -> Problem:
    """Return 8-bit float operands with a result dtype that numpy supports."""
    problem = Problem.scaled_mm(16, 32, 64, device_type="cuda", **fields)
    return dataclasses.replace(problem, out=Layout.contiguous((16, 32), F16))


CASES = {
    "mm": Problem.mm(5, 7, 3, dtype=F32, device_type="cuda"),
    "mm tn": Problem.mm(5, 7, 3, dtype=F32, layout="tn", device_type="cuda"),
    "mm transposed": Problem.mm(5, 7, 3, dtype=torch.float64, layout="tt", device_type="cuda"),
    "addmm bias": Problem.addmm(5, 8, 3, dtype=F32, bias="n", alpha=1.5, beta=1, device_type="cuda"),
    "addmm matrix": Problem.addmm(5, 8, 3, dtype=F32, bias="mn", alpha=2.5, beta=-0.75, device_type="cuda"),
    "addmm unread": Problem.addmm(4, 4, 4, dtype=F32, bias="m1", beta=0, device_type="cuda"),
    "bmm": Problem.bmm(3, 4, 8, 5, dtype=F16, device_type="cuda"),
    "baddbmm": Problem.baddbmm(3, 4, 8, 5, dtype=F32, bias="n", alpha=1, beta=1, device_type="cuda"),
    "baddbmm matrix": Problem.baddbmm(3, 4, 8, 5, dtype=F32, bias="mn", alpha=1, beta=-0.5, device_type="cuda"),
    "int_mm": Problem.int_mm(32, 16, 32, device_type="cuda"),
    "scaled_mm": scaled(),
    "scaled_mm rows": scaled(scales="row"),
}


def planned(problem: Problem, rank: int = 0) -> Plan:
    """Return the plan of an algorithm of the fake. All but the first need a workspace."""
    found = BACKEND.enumerate(problem, DEVICE, Settings())
    assert found.choices, found.refusals
    choice = found.choices[min(rank, len(found.choices) - 1)]
    return Plan(problem=problem, choice=choice, kernel=choice.build(), origin="only choice")


def kept(plan: Plan, *, seed: int = 1) -> tuple[Arguments, Any]:
    """Return a call that the native look-up finds, with its operands."""
    problem = plan.problem
    operands = random_operands(dataclasses.replace(problem, device_type="cpu"), torch.device("cpu"), seed=seed)
    out = torch.full(problem.out.size, 7, dtype=problem.out.dtype)
    call = arguments(problem.op, *operands.tensors, out=out, scalars=operands.scalars)
    assert native.module.keep(native.generation, record_of(plan), *call)
    return call, operands


@pytest.mark.parametrize("rank", [0, 1], ids=["bare", "workspace"])
@pytest.mark.parametrize("name", CASES)
def test_the_library_receives_the_arguments_of_python(fake: Fake, name: str, rank: int) -> None:
    plan = planned(CASES[name], rank)
    prepared = plan.kernel.prepared
    assert isinstance(prepared, LibraryProduct)
    call, operands = kept(plan)
    out = call[1]
    assert native.module.look_up(*call) is out
    assert fake.native == 1 + len(prepared.pointers)
    got = out.clone()
    out.fill_(7)
    plan.kernel.run(out, operands.tensors, operands.scalars)
    assert torch.equal(got, out)
    ours, pythons = fake.launches
    assert ours == pythons


@pytest.mark.parametrize("name", ["mm", "addmm matrix", "addmm bias", "bmm", "baddbmm", "baddbmm matrix", "mm tn"])
@settings.patch(native=True)
def test_other_ms_match_python(fake: Fake, name: str) -> None:
    """Layouts follow M. cuBLASLt checks once for each M that the algorithm works with the existing workspace."""
    (rows_class,) = row_classes(CASES[name])
    rows = rows_class.within(range(2, 60))
    widest = planned(with_rows(CASES[name], 59), 1).choice

    @functools.cache
    def plan_at(m: int) -> Plan:
        choice = widest.at(with_rows(CASES[name], m), DEVICE)
        assert not isinstance(choice, str)
        return Plan(problem=choice.problem, choice=choice, kernel=choice.build(), origin="range")

    def call_of(m: int) -> tuple[Arguments, Any]:
        problem = plan_at(m).problem
        operands = random_operands(dataclasses.replace(problem, device_type="cpu"), torch.device("cpu"), seed=m)
        out = torch.full(problem.out.size, 7, dtype=problem.out.dtype)
        return arguments(problem.op, *operands.tensors, out=out, scalars=operands.scalars), operands

    following = following_operands(rows_class)
    assert following is not None
    call, _ = call_of(5)
    assert lookup.rows_served(native.generation, call, following, lambda: [lookup.Run(rows=rows, plan_at=plan_at)])
    for m in (rows[0], 31, 59, 31):
        call, operands = call_of(m)
        out = call[1]
        before = len(fake.launches), fake.native
        assert native.module.look_up(*call) is out
        assert len(fake.launches) == before[0] + 1
        assert fake.native > before[1], "the library's functions were called by their addresses"
        got = out.clone()
        out.fill_(7)
        plan_at(m).kernel.run(out, operands.tensors, operands.scalars)
        assert torch.equal(got, out)
    call, _ = call_of(41)
    fake.check_fails = 15
    asked = fake.native
    with pytest.raises(TypeError, match="answered"):
        refused(call)
    assert fake.native > asked
    native.module.look_up(*call_of(31)[0])


def refused(call: Arguments) -> None:
    """Check that a call reaches Python, which has no GPU to run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, "key_of", answered)
        patch.setattr(path, "_key_of_more", answered)
        native.module.look_up(*call)


def answered(*_: object) -> None:
    raise TypeError("Python has answered")


def test_a_bias_and_scales_of_the_call_are_read(fake: Fake) -> None:
    plan = planned(biased(CASES["scaled_mm"]))
    assert isinstance(plan.kernel.prepared, LibraryProduct)
    assert len(plan.kernel.prepared.pointers) == 3
    wanted, got = [], []
    for seed in (1, 2):
        call, operands = kept(plan, seed=seed)
        got.append(native.module.look_up(*call).clone())
        out = torch.empty_like(call[1])
        plan.kernel.run(out, operands.tensors, operands.scalars)
        wanted.append(out)
    assert fake.native == 2 * 4
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
    assert not torch.equal(*got)


def test_scales_that_need_a_layout_are_left_to_python(fake: Fake) -> None:
    problem = CASES["scaled_mm rows"]
    assert problem.scale_a is not None
    one = dataclasses.replace(problem, scale_a=dataclasses.replace(problem.scale_a, stride=(2, 1)))
    assert planned(problem).kernel.prepared is not None
    assert planned(one).kernel.prepared is None


def test_python_reports_a_status(fake: Fake) -> None:
    call, _ = kept(planned(CASES["mm"]))
    fake.fail = 13
    with pytest.raises(RuntimeError, match=r"^cublasLtMatmul: EXECUTION_FAILED \(13\)$"):
        native.module.look_up(*call)


def test_a_workspace_is_kept_for_the_stream_and_not_used_by_a_graph(fake: Fake) -> None:
    call, _ = kept(planned(CASES["mm"], 1))
    for captures in (0, 0, 1, 0):
        fake.captures = captures
        native.module.look_up(*call)
    first, second, captured, last = (x["scratch"] for x in fake.launches)
    assert first == second == last == launch._blocks[-1, STREAM].data_ptr()
    assert captured != first
    assert fake.native == 3


def test_functions_without_an_address_are_left_to_python(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "function_address", lambda name: None)
    assert planned(CASES["mm"]).kernel.prepared is None
    assert library.function_address("cublasLtMatmul") is None, "without the bindings"


def test_threads_do_not_exchange_the_pointers_of_an_operation(fake: Fake) -> None:
    plan = planned(CASES["addmm bias"])
    calls = [kept(plan, seed=seed) for seed in range(4)]
    wanted = []
    for call, operands in calls:
        plan.kernel.run(call[1], operands.tensors, operands.scalars)
        wanted.append(call[1].clone())
    wrong: list[int] = []

    def work(number: int) -> None:
        call, operands = calls[number % 4]
        for _ in range(25):
            result = native.module.look_up(
                *arguments("addmm", *operands.tensors, out=torch.empty_like(call[1]), scalars=operands.scalars)
            )
            if not torch.equal(result, wanted[number % 4]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
