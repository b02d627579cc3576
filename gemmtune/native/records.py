"""What the extension module is given to keep of a plan."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ..choice import Prepared
from ..problem import Problem
from ..toolchain.prepared import DriverLaunch, HostFunction, TorchOperation

LENGTHY_FLOPS = 1e6
"""A product with more of them, ten microseconds, lets other threads of Python run meanwhile, which costs it 0.1 µs."""
PYTHON, HOST_FUNCTION, TORCH, DRIVER = range(4)
"""``Kind`` of table.h."""
OPERATIONS = ("mm", "bmm", "addmm", "baddbmm")
FORMS = ("given", "vector", "matrix")


def record_of(entry: Any) -> tuple[object, ...]:
    """The record of an entry of the table of ready plans, as ``parse.h`` takes it."""
    plan = entry.plan
    problem: Problem = plan.problem
    kind, launch, owner = _launch(plan.kernel.prepared)
    lengthy = problem.device_type != "cpu" or problem.flops > LENGTHY_FLOPS
    choice = plan.choice if plan.choice.packed_format is not None else None
    out = problem.out
    size, stride = tuple(out.size), tuple(out.stride)
    return (entry, entry.new, plan.into, choice, owner, plan.spans, size, stride, out.dtype, lengthy, kind, launch)


@functools.singledispatch
def _launch(prepared: Prepared | None) -> tuple[int, tuple[object, ...], object]:
    """The kind of a launch, what it is told, and what has to stay in memory."""
    assert prepared is None
    return PYTHON, (), None


@_launch.register
def _(prepared: HostFunction) -> tuple[int, tuple[object, ...], object]:
    told = (prepared.function, prepared.plan, prepared.plain, prepared.swapped, prepared.added)
    return HOST_FUNCTION, told, prepared.owner


@_launch.register
def _(prepared: TorchOperation) -> tuple[int, tuple[object, ...], object]:
    return TORCH, (OPERATIONS.index(prepared.operation), FORMS.index(prepared.inp)), None


@_launch.register
def _(prepared: DriverLaunch) -> tuple[int, tuple[object, ...], object]:
    record, call = prepared.record, prepared.driver.call
    functions = (call.cuLaunchKernelEx, call.cuCtxSetCurrent, call.cuTensorMapEncodeTiled)
    told = (
        *(ctypes.cast(function, ctypes.c_void_p).value for function in functions),
        prepared.function,
        prepared.context,
        record.grid,
        record.cluster,
        record.threads,
        record.shared_bytes,
        record.pdl,
        -1 if prepared.skipped is None else prepared.skipped,
        record.parameters,
        record.arguments,
        tuple((x.operand, x.data_type, int(x.swizzle), x.promotion, x.sizes, x.pitches, x.box) for x in record.maps),
        tuple((x.offset, x.operand, x.more_bytes) for x in record.addresses),
        tuple((x.offset, x.number) for x in record.scalars),
        tuple((x.offset, x.operand, x.multiple_bytes) for x in record.aligned),
        tuple(record.alignment),
    )
    return DRIVER, told, (prepared.owner, prepared.driver)
