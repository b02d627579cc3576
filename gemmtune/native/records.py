"""Conversion of a plan to the tuple that the extension module keeps."""

import dataclasses
import functools
from typing import Any

from ..choice import Prepared
from ..problem import Problem
from ..toolchain.prepared import DeviceFunction, DriverLaunch, HostFunction, LibraryProduct, Memory, TorchOperation
from .following import MOST_RANK, OfRows, numbers_of

LENGTHY_FLOPS = 1e6
"""Products with more FLOPs (ten microseconds) release the GIL for other Python threads, which costs the product 0.1 µs."""
OPERATIONS = ("mm", "bmm", "addmm", "baddbmm")
FORMS = ("given", "vector", "matrix")
KINDS: tuple[type[Prepared] | None, ...] = (None, HostFunction, TorchOperation, DriverLaunch, DeviceFunction, LibraryProduct)
"""Kinds in the order of ``Launch`` in table.h. None is a call that only Python can run."""
NEVER = 2**62


def record_of(entry: Any) -> tuple[object, ...]:
    """Return the record of an entry in the table of ready plans, as ``parse.h`` reads it."""
    problem: Problem = entry.plan.problem
    lengthy = problem.device_type != "cpu" or problem.flops > LENGTHY_FLOPS
    prepared: Any = entry.plan.kernel.prepared
    of_rows = None if prepared is None else OfRows(prepared=prepared)
    return _record(entry, 0 if lengthy else NEVER, (0, 0), of_rows)


def record_of_rows(plan: Any, rows: range, of_rows: OfRows) -> tuple[object, ...]:
    """Return the record for several Ms, from the plan for the largest of them."""
    problem: Problem = plan.problem
    lengthy_from = 0 if problem.device_type != "cpu" else int(LENGTHY_FLOPS / problem.flops * problem.m) + 1
    return _record(plan, lengthy_from, (rows[0], rows[-1]), of_rows)


def launch_of(of_rows: OfRows) -> tuple[int, tuple[object, ...]]:
    return KINDS.index(type(of_rows.prepared)), _launch(of_rows.prepared, of_rows)


def _record(entry: Any, lengthy_from: int, rows: tuple[int, int], of_rows: OfRows | None) -> tuple[object, ...]:
    plan, out = entry.plan, entry.plan.problem.out
    choice = plan.choice if plan.choice.packed_format is not None else None
    prepared = of_rows.prepared if of_rows is not None else None
    memory: Memory | None = getattr(prepared, "memory", None)
    owner = getattr(prepared, "owner", None)
    kept = (memory.tensors, memory.capture) if memory is not None else None
    kind, launch = launch_of(of_rows) if of_rows is not None else (0, ())
    return (entry, entry.new, plan.into, choice, owner, len(plan.spans) - 1, tuple(out.size), tuple(out.stride), out.dtype,
            lengthy_from, *rows, kept, kind, launch)  # fmt: skip


@functools.singledispatch
def _launch(prepared: Prepared, of_rows: OfRows) -> tuple[object, ...]:  # noqa: ARG001 - the registered functions use it
    """Return the arguments of a launch in the order of its ``parse`` in parse.h."""
    raise TypeError(f"got {type(prepared).__name__}, expected a launch of toolchain.prepared")


@_launch.register
def _(prepared: HostFunction, of_rows: OfRows) -> tuple[object, ...]:
    rows = prepared.rows
    places, most, per_thread = (rows.places, rows.most, rows.per_thread) if rows else ((0,) * 5, (1,) * 3, (1.0, 1.0))
    work = (of_rows.flops_per_row, of_rows.bytes, of_rows.bytes_per_row)
    head = (prepared.function, prepared.plan, prepared.plain, prepared.swapped, prepared.added)
    return (*head, prepared.words if rows else 0, places, most, work, per_thread, _rows(of_rows))


@_launch.register
def _(prepared: TorchOperation, of_rows: OfRows) -> tuple[object, ...]:  # noqa: ARG001 - it has no numbers
    return (OPERATIONS.index(prepared.operation), FORMS.index(prepared.inp))


@_launch.register
def _(prepared: DriverLaunch, of_rows: OfRows) -> tuple[object, ...]:
    record, skipped = prepared.record, -1 if prepared.skipped is None else prepared.skipped
    driver = (prepared.launch, prepared.set_context, prepared.function, prepared.context)
    launched = (record.grid, record.cluster, record.threads, record.shared_bytes, record.pdl, skipped)
    given = (record.parameters, record.arguments, prepared.maps, prepared.encode)
    addresses = tuple((x.offset, x.operand, x.more_bytes) for x in record.addresses)
    scalars = tuple((x.offset, x.number, x.wide) for x in record.scalars)
    aligned = tuple((x.offset, x.operand, x.multiple_bytes) for x in record.aligned)
    # Tensor maps as ``parse_maps`` reads them.
    maps = tuple(
        (i, x.data_type, len(x.sizes), int(x.swizzle), x.promotion, *numbers_of(x), *x.box, *[0] * (MOST_RANK - len(x.box)))
        for i, x in ((number, record.maps[number]) for number in of_rows.maps)
    )
    filled = (addresses, scalars, aligned, tuple(record.alignment))
    return (*driver, *launched, *given, *filled, _rows(of_rows), maps, prepared.encode_map)


@_launch.register
def _(prepared: DeviceFunction, of_rows: OfRows) -> tuple[object, ...]:
    places = (prepared.left, prepared.right, prepared.first, prepared.count)
    memory_bytes = prepared.memory.size_bytes if prepared.memory is not None else 0
    plan = (prepared.need, prepared.plan_bytes, memory_bytes)
    return (prepared.function, prepared.plan, *places, prepared.alignment, *plan, _rows(of_rows))


@_launch.register
def _(prepared: LibraryProduct, of_rows: OfRows) -> tuple[object, ...]:
    scalars = (value for x in (prepared.alpha, prepared.beta) for value in (x is not None, float(x or 0)))
    head = (prepared.function, prepared.set_attribute, prepared.handle, prepared.operation, prepared.layouts, prepared.algorithm)
    places = (prepared.left, prepared.right, -1 if prepared.added is None else prepared.added, prepared.pointers)
    sizes = (prepared.check, prepared.set_size, _rows(of_rows))
    return (*head, prepared.workspace_bytes, prepared.scalar, *scalars, *places, *sizes)


def _rows(of_rows: OfRows) -> tuple[tuple[int, ...], ...]:
    """Return the tuples that ``parse.h`` reads: the fields of each number that follows M, in their order."""
    return tuple(map(dataclasses.astuple, of_rows.numbers))
