"""What the extension module is given to keep of a plan."""

from __future__ import annotations

import functools
from typing import Any

from ..choice import Prepared
from ..problem import Problem
from ..toolchain.prepared import DeviceFunction, DriverLaunch, HostFunction, LibraryProduct, Memory, TorchOperation

LENGTHY_FLOPS = 1e6
"""A product with more of them, ten microseconds, lets other threads of Python run meanwhile, which costs it 0.1 µs."""
OPERATIONS = ("mm", "bmm", "addmm", "baddbmm")
FORMS = ("given", "vector", "matrix")
KINDS: tuple[type[Prepared] | None, ...] = (None, HostFunction, TorchOperation, DriverLaunch, DeviceFunction, LibraryProduct)
"""In the order of ``Launch`` of table.h; None for what Python alone does."""


def record_of(entry: Any) -> tuple[object, ...]:
    """The record of an entry of the table of ready plans, as ``parse.h`` takes it."""
    plan = entry.plan
    problem: Problem = plan.problem
    prepared: Any = plan.kernel.prepared
    launch = _launch(prepared) if prepared is not None else ()
    kind = KINDS.index(type(prepared) if prepared is not None else None)
    lengthy = problem.device_type != "cpu" or problem.flops > LENGTHY_FLOPS
    choice = plan.choice if plan.choice.packed_format is not None else None
    out = problem.out
    memory: Memory | None = getattr(prepared, "memory", None)
    owner = getattr(prepared, "owner", None)
    kept = (memory.tensors, memory.capture) if memory is not None else None
    return (entry, entry.new, plan.into, choice, owner, plan.spans, tuple(out.size), tuple(out.stride), out.dtype, lengthy, kept,
            kind, launch)  # fmt: skip


@functools.singledispatch
def _launch(prepared: Prepared) -> tuple[object, ...]:
    """What is told of a launch, in the order of its ``parse`` of parse.h."""
    raise TypeError(f"got {type(prepared).__name__}, expected a launch of toolchain.prepared")


@_launch.register
def _(prepared: HostFunction) -> tuple[object, ...]:
    return (prepared.function, prepared.plan, prepared.plain, prepared.swapped, prepared.added)


@_launch.register
def _(prepared: TorchOperation) -> tuple[object, ...]:
    return (OPERATIONS.index(prepared.operation), FORMS.index(prepared.inp))


@_launch.register
def _(prepared: DriverLaunch) -> tuple[object, ...]:
    record = prepared.record
    return (
        prepared.launch,
        prepared.set_context,
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
        prepared.maps,
        prepared.encode,
        tuple((x.offset, x.operand, x.more_bytes) for x in record.addresses),
        tuple((x.offset, x.number, x.wide) for x in record.scalars),
        tuple((x.offset, x.operand, x.multiple_bytes) for x in record.aligned),
        tuple(record.alignment),
    )


@_launch.register
def _(prepared: DeviceFunction) -> tuple[object, ...]:
    places = (prepared.left, prepared.right, prepared.first, prepared.count)
    return (prepared.function, prepared.plan, *places, prepared.alignment)


@_launch.register
def _(prepared: LibraryProduct) -> tuple[object, ...]:
    scalars = ((x is not None, float(x or 0)) for x in (prepared.alpha, prepared.beta))
    return (
        prepared.function,
        prepared.set_attribute,
        prepared.handle,
        prepared.operation,
        prepared.layouts,
        prepared.algorithm,
        prepared.workspace_bytes,
        prepared.scalar,
        *(value for pair in scalars for value in pair),
        prepared.left,
        prepared.right,
        -1 if prepared.added is None else prepared.added,
        prepared.pointers,
    )
