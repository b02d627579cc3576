"""The dependence of a launch on M: derived from plans for a few Ms and verified against plans for others."""

import ctypes
import dataclasses
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..choice import Prepared
from ..toolchain.prepared import DeviceFunction, DriverLaunch, HostFunction, LibraryProduct, TorchOperation
from ..toolchain.record import TensorMap

GRID_BYTES = 12
MOST_RANK = 5
"""Maximum rank of a tensor map."""
UNLIMITED = 2**62
RANDOM_ROWS = 12
EDGES = 3
"""Number of places, at which a value changes, where both sides are checked."""
MOST_PARTS = 4
"""Maximum number of sub-ranges of M for one kernel, each with its kind of launch. Python binds the remaining Ms."""
LAYOUT_BYTES = 56
"""Bytes of cublasLtMatrixLayoutOpaque_t that cuBLASLt sets. The following 8 bytes keep their old content (seen with 13.1)."""

PreparedAt = Callable[[int], Prepared | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """Number at ``place`` in a launch's image: ``first`` until M = ``base``, plus ``step`` per begun ``unit``, up to ``most``."""

    place: int
    first: int
    step: int
    base: int
    unit: int
    most: int = UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRows:
    """A launch planned for the largest of several Ms, with the numbers that follow M.

    ``maps`` are the numbers of the tensor maps that follow M. For a plan of the cpp backend, the work is ``flops_per_row`` for each
    row, and ``bytes`` plus ``bytes_per_row`` for each row.
    """

    prepared: Prepared
    numbers: tuple[Following, ...] = ()
    maps: tuple[int, ...] = ()
    flops_per_row: int = 0
    bytes: int = 0
    bytes_per_row: int = 0


def learned(prepared_at: PreparedAt, rows: range) -> OfRows | None:
    """Return how launches for ``rows`` follow M. None if no known rule fits."""
    low, high = prepared_at(rows[0]), prepared_at(rows[-1])
    if high is None or _fixed(high) is None or _fixed(low) != _fixed(high):
        return None
    if isinstance(high, TorchOperation):
        return OfRows(prepared=high)
    work = _work_of_host(low, high, rows) if isinstance(high, HostFunction) else {}
    maps = _maps_of_rows(low, high)
    if maps is None or work is None:
        return None
    known: dict[int, Sequence[int]] = {}

    def numbers_at(m: int) -> Sequence[int]:
        if m not in known:
            made = prepared_at(m)
            known[m] = _numbers(made, maps) if made is not None else ()
        return known[m]

    numbers = _numbers_of_rows(numbers_at, rows)
    if numbers is None:
        return None
    places = _places(high, maps)
    placed = tuple(dataclasses.replace(x, place=places[x.place]) for x in numbers)
    return OfRows(prepared=high, numbers=placed, maps=maps, **work)


def alike(prepared_at: PreparedAt, rows: range) -> Iterator[range]:
    """Yield parts of ``rows`` whose launches are of one kind. From some M on, for example, the transposed product is computed."""
    for _ in range(MOST_PARTS):
        first = _fixed(prepared_at(rows[0]))
        count, behind = 1, len(rows)
        if _fixed(prepared_at(rows[-1])) == first:
            count = behind
        while behind - count > 1:
            middle = (count + behind) // 2
            count, behind = (middle, behind) if _fixed(prepared_at(rows[middle - 1])) == first else (count, middle)
        yield rows[:count]
        rows = rows[count:]
        if not rows:
            return


def rows_to_compare(of_rows: OfRows, rows: range) -> list[int]:
    """Return the Ms at which the derived rule is verified against plans: ends, powers of two, edges of units, and random ones."""
    lo, hi = rows[0], rows[-1]
    wanted = {*rows[:2], rows[len(rows) // 2], *rows[-2:]}
    wanted |= {power + step for i in range(32) for power in (1 << i,) for step in (-1, 0, 1)}
    for base, unit in {(x.base, x.unit) for x in of_rows.numbers if x.unit > 1}:
        units = (hi - base) // unit
        wanted |= {base + units * part // EDGES * unit + step for part in range(EDGES + 1) for step in (0, 1)}
    generator = random.Random(lo)
    wanted |= {generator.choice(rows) for _ in range(RANDOM_ROWS)}
    return sorted(m for m in wanted if m in rows)


def why_apart(prepared: Prepared | None, of_rows: OfRows, image: bytes) -> str | None:
    """Return why a launch differs from the one that ``of_rows`` predicts with that ``image``, or needs more memory; or None.

    A library's check runs at each M during the call. Python serves the Ms that it rejects, or for which it has more memory.
    """
    high = of_rows.prepared
    if isinstance(high, LibraryProduct) and prepared is None:
        return None
    if prepared is None or (differences := _differences(_fixed(prepared), _fixed(high))):
        return "there is no launch" if prepared is None else f"another launch: {differences}"
    needs = [0 if (memory := getattr(x, "memory", None)) is None else memory.size_bytes for x in (prepared, high)]
    # A function of nvcc reports its need during the call, too.
    if needs[0] > needs[1] and not isinstance(high, (DeviceFunction, LibraryProduct)):
        return f"memory of {needs[0]} bytes, more than {needs[1]}"
    return None if image == image_of(prepared, of_rows.maps) else "the arguments of the launch differ"


def _differences(one: object, other: object) -> str:
    """Return the fixed parts that differ, as text; empty if all are equal."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return ", ".join(f"{x} and {y}" for x, y in zip(one, other, strict=True) if x != y)
    return "" if one == other else f"{one} and {other}"


def image_of(prepared: Prepared, maps: Sequence[int]) -> bytes:
    """Return the arguments of a launch without addresses, in the format of ``rehearse`` in the extension module."""
    match prepared:
        case HostFunction():
            return ctypes.string_at(prepared.plan, 8 * prepared.words)
        case DeviceFunction():
            return ctypes.string_at(prepared.plan, prepared.plan_bytes)
        case LibraryProduct():
            return b"".join(ctypes.string_at(layout, LAYOUT_BYTES) for layout in prepared.layouts)
        case DriverLaunch():
            record = prepared.record
            numbers = [x.more_bytes for x in record.addresses] + [x for i in maps for x in numbers_of(record.maps[i])]
            return struct.pack("3I", *record.grid) + record.parameters + struct.pack(f"{len(numbers)}q", *numbers)
        case _:
            return b""


def _work_of_host(low: Prepared | None, high: HostFunction, rows: range) -> dict[str, int] | None:
    """Return the work of a cpp plan as fields of ``OfRows``. None if it is not linear in M, or the plan divides no rows of a."""
    assert isinstance(low, HostFunction)
    if low.rows is None or high.rows is None:
        return None
    apart = max(rows[-1] - rows[0], 1)
    per_row, rest = divmod(high.rows.bytes - low.rows.bytes, apart)
    flops_per_row, more = divmod(high.rows.flops, rows[-1])
    if rest or more or flops_per_row * rows[0] != low.rows.flops:
        return None
    return {"flops_per_row": flops_per_row, "bytes": high.rows.bytes - per_row * rows[-1], "bytes_per_row": per_row}


def _fixed(prepared: Prepared | None) -> object:
    """Return the parts of a launch that must be equal for all Ms."""
    match prepared:
        case HostFunction():
            how = prepared.rows
            divided = (how.places, how.most, how.per_thread) if how is not None else None
            return (prepared.function, prepared.words, prepared.plain, prepared.swapped, prepared.added, divided)
        case DeviceFunction():
            of_call = (prepared.left, prepared.right, prepared.first, prepared.count)
            return (prepared.function, prepared.need, prepared.plan_bytes, of_call, prepared.alignment)
        case LibraryProduct():
            if not (prepared.check and prepared.set_size):
                return None
            places = (prepared.left, prepared.right, prepared.added, prepared.pointers)
            scalars = (prepared.scalar, prepared.alpha, prepared.beta)
            return (prepared.function, prepared.handle, prepared.algorithm, scalars, places, prepared.look)
        case DriverLaunch():
            record = prepared.record
            launched = (record.cluster, record.threads, record.shared_bytes, record.pdl, record.arguments, len(record.parameters))
            filled = (tuple((x.offset, x.operand) for x in record.addresses), record.scalars, record.aligned, record.alignment)
            maps = tuple((x.operand, x.dtype, len(x.sizes), x.box, x.swizzle, x.promotion_bytes) for x in record.maps)
            return (prepared.function, prepared.skipped, prepared.maps, launched, filled, maps)
        case _:
            return prepared


def _maps_of_rows(low: Prepared | None, high: Prepared) -> tuple[int, ...] | None:
    """Return the numbers of the tensor maps that follow M. None if the record does not contain the maps."""
    if not isinstance(high, DriverLaunch) or not isinstance(low, DriverLaunch) or not high.maps:
        return ()
    if len(high.record.maps) != len(high.maps) or not high.encode_map:
        return None
    pairs = zip(low.record.maps, high.record.maps, strict=True)
    return tuple(i for i, (x, y) in enumerate(pairs) if numbers_of(x) != numbers_of(y))


def _numbers(prepared: Prepared, maps: Sequence[int]) -> Sequence[int]:
    """Return all numbers of the image that may follow M."""
    if isinstance(prepared, LibraryProduct):
        return prepared.sizes
    image = image_of(prepared, maps)
    if isinstance(prepared, HostFunction):
        divided = prepared.rows.places if prepared.rows is not None else ()  # HostRows computes these
        return [0 if i in divided else x for i, x in enumerate(struct.unpack(f"{prepared.words}q", image))]
    narrow = _narrow_bytes(prepared, image)
    return (*struct.unpack(f"{narrow // 4}I", image[:narrow]), *struct.unpack(f"{(len(image) - narrow) // 8}q", image[narrow:]))


def _narrow_bytes(prepared: Prepared, image: bytes) -> int:
    """Return the size of the first part of an image, whose numbers have 4 bytes. The rest have 8 bytes."""
    if isinstance(prepared, HostFunction):
        return 0
    return GRID_BYTES + len(prepared.record.parameters) if isinstance(prepared, DriverLaunch) else len(image)


def _places(prepared: Prepared, maps: Sequence[int]) -> Sequence[int]:
    """Return the place of each of ``_numbers`` in the image, or for a library's product among its sizes."""
    if isinstance(prepared, LibraryProduct):
        return range(len(prepared.sizes))
    image = image_of(prepared, maps)
    narrow = _narrow_bytes(prepared, image)
    return (*range(0, narrow, 4), *range(narrow, len(image), 8))


def numbers_of(one: TensorMap) -> tuple[int, ...]:
    """Return sizes and pitches of a tensor map, ``MOST_RANK`` of each."""
    return tuple(x for values in (one.sizes, one.pitches) for x in (*values, *[0] * (MOST_RANK - len(values))))


def _numbers_of_rows(numbers_at: Callable[[int], Sequence[int]], rows: range) -> list[Following] | None:
    """Return the numbers that differ between both ends. None if one of them does not grow in equal steps."""
    lo, hi = rows[0], rows[-1]
    first, last = numbers_at(lo), numbers_at(hi)
    found: list[Following] = []
    if len(first) != len(last):
        return None
    for i in (i for i, (x, y) in enumerate(zip(first, last, strict=True)) if x != y):
        change = _change(numbers_at, i, rows)
        step, base = numbers_at(change)[i] - first[i], change - 1
        others = rows[rows.index(change) :]
        unit = (_change(numbers_at, i, others) - change) if numbers_at(change)[i] != last[i] else max(hi - base, 1)
        most = first[i] + step * -(-(hi - base) // unit)
        if step < 1 or most < last[i]:
            return None
        found.append(Following(place=i, first=first[i], step=step, base=base, unit=unit, most=last[i]))
    return found


def _change(numbers_at: Callable[[int], Sequence[int]], i: int, rows: range) -> int:
    """Return the first M of ``rows`` at which number ``i`` differs from its value at the first row. It differs at the last."""
    before, at, changed = 0, numbers_at(rows[0])[i], len(rows) - 1
    while changed - before > 1:
        middle = (before + changed) // 2
        numbers = numbers_at(rows[middle])
        before, changed = (middle, changed) if i < len(numbers) and numbers[i] == at else (before, middle)
    return rows[changed]
