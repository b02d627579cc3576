"""Classes of problems that differ only in M, the rows of a and of the result. Serving one weight with many batches is a case."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidProblemError
from .layout import ALIGNED_BYTES, Layout
from .problem import Problem
from .scales import SCALE_BLOCK

_BASE = 1024
"""Base of the M that represents a class. It is so large that no other extent along M equals it by chance."""
_BROADCAST = ("inp", "scale_a")
"""Roles whose operands may have one row for all rows of the result."""


@dataclass(frozen=True, kw_only=True)
class RowClass:
    """All problems that differ from ``problem`` only in M and, if M is part of a stride, share its power of two up to 16."""

    problem: Problem

    @functools.cached_property
    def key(self) -> str:
        """The class's part of a store key."""
        return self.problem.key

    @property
    def step(self) -> int:
        """The largest power of two, up to 16, that divides every M of the class; 0 if M is part of no stride."""
        return math.gcd(self.problem.m, ALIGNED_BYTES) if _strides_have_rows(self.problem) else 0

    @property
    def apart(self) -> int:
        """The distance between two consecutive Ms of the class."""
        return self.step if self.step == ALIGNED_BYTES else max(2 * self.step, 1)

    def has(self, m: int) -> bool:
        """Return True if the class has a problem with ``m`` rows."""
        return m >= 1 and (not self.step or math.gcd(m, ALIGNED_BYTES) == self.step)

    def within(self, rows: range) -> range:
        """Return the Ms of the class in an interval."""
        if not self.step:
            return rows
        return range(rows.start + (self.step - rows.start) % self.apart, rows.stop, self.apart)

    def at(self, m: int) -> Problem:
        """Return the problem with ``m`` rows. Raise InvalidProblemError if the class has none."""
        if not self.has(m):
            condition = f" whose largest power of two up to {ALIGNED_BYTES} is {self.step}" if self.step else ""
            raise InvalidProblemError(f"rows: got M = {m}, expected a whole number of at least 1{condition}")
        return with_rows(self.problem, m)

    def __str__(self) -> str:
        which = {0: "", 1: " with odd M", ALIGNED_BYTES: f" with M a multiple of {ALIGNED_BYTES}"}
        suffix = which.get(self.step, f" with M an odd multiple of {self.step}")
        return str(self.problem).replace(f"{self.problem.m}x", "Mx", 1) + suffix


class Relaid:
    """Unchecked constructor of problems of a class. Raises InvalidProblemError if M is part of a stride, or for an epilogue."""

    def __init__(self, rows_class: RowClass) -> None:
        problem = rows_class.problem
        if rows_class.step or problem.batched or problem.epilogue is not None or problem.a.stride[-1] != 1:
            raise InvalidProblemError(f"rows: got {rows_class}, expected a class with row-major operands and no epilogue")
        self._fields = [(name, getattr(problem, name)) for name in problem.__dataclass_fields__]
        self._moving = [
            (place, layout, unit)
            for place, layout in _operands(problem)
            if (unit := _rows_of_one(problem, place, layout, ())) is not None
        ]

    def at(self, m: int) -> Problem:
        """Return the problem with ``m`` rows."""
        made = object.__new__(Problem)
        put = object.__setattr__
        for name, value in self._fields:
            put(made, name, value)
        put(made, "m", m)
        for place, layout, unit in self._moving:
            moved = object.__new__(Layout)
            put(moved, "size", (-(-m // unit), layout.size[1]))
            put(moved, "stride", layout.stride)
            put(moved, "dtype", layout.dtype)
            put(moved, "offset", layout.offset)
            put(made, place, moved)
        put(made, "scales", tuple(x for x in (made.scale_a, made.scale_b, made.zero_b) if x is not None))
        return made


def following_operands(rows_class: RowClass) -> int | None:
    """Return a bit per operand, in reading order, set if it has one row per result row; None if M or shared rows prevent it."""
    problem = rows_class.problem
    if (rows_class.step and problem.batched) or problem.operation.grouped:
        return None
    read = [(place, layout) for place, layout in _operands(problem) if place != "out"]
    units = [_rows_of_one(problem, place, layout, ()) for place, layout in read]
    return None if set(units) - {None, 1} else sum(1 << i for i, unit in enumerate(units) if unit)


def row_classes(problem: Problem) -> tuple[RowClass, ...]:
    """Return the classes that contain a problem, likeliest first: none if empty, several if M = 1 lets rows broadcast."""
    if problem.empty or _by_index(problem):
        return ()
    if problem.m > 1:
        return (_class_of(problem, ()),)
    return _classes_of_one_row(problem)


def classes_over(problem: Problem, rows: range) -> tuple[RowClass, ...]:
    """Return the classes with ``rows`` as M, several if M is part of a stride. Raises InvalidProblemError if empty or M is 1."""
    if _by_index(problem):
        raise InvalidProblemError(
            f"m: got {problem}, whose rows are picked or added up by an index; expected one without an index: it has no table of Ms"
        )
    found = row_classes(problem)
    if not found:
        raise InvalidProblemError(f"m: got {problem}, whose result is empty; expected M, N and any batch of at least 1")
    if len(found) != 1:
        raise InvalidProblemError(
            f"m: got {problem}, whose operands of one row may broadcast or may follow M; expected a problem with M = 2 or more "
            "to represent all others"
        )
    (known,) = found
    if not known.step:
        return (known,)
    steps = {math.gcd(m, ALIGNED_BYTES): m for m in rows[:ALIGNED_BYTES]}
    return tuple(_class_of(with_rows(known.problem, m + ALIGNED_BYTES), ()) for _, m in sorted(steps.items()))


def _by_index(problem: Problem) -> bool:
    """Return True if an index makes M differ from the number of rows of a or of out."""
    return problem.rows is not None or problem.slots is not None


@functools.lru_cache(maxsize=4096)
def _classes_of_one_row(problem: Problem) -> tuple[RowClass, ...]:
    places = [place for place, _ in _operands(problem) if _may_broadcast(place)]
    found: dict[RowClass, None] = {}
    for units in itertools.product(*((1, SCALE_BLOCK, None) if place == "scale_a" else (1, None) for place in places)):
        with contextlib.suppress(InvalidProblemError):  # this operand cannot follow M in that way
            found[_class_of(problem, tuple(zip(places, units, strict=True)))] = None
    return tuple(found)


def with_rows(problem: Problem, m: int) -> Problem:
    """Return the problem with another M. Its own M, which must exceed 1, shows which operands follow M."""
    return _relaid(problem, m, ())


Units = tuple[tuple[str, int | None], ...]
"""Operands of one row, each with the number of result rows that one of its rows serves. None means all of them."""


@functools.lru_cache(maxsize=4096)
def _class_of(problem: Problem, units: Units) -> RowClass:
    step = math.gcd(problem.m, ALIGNED_BYTES) if _strides_have_rows(problem, units) else ALIGNED_BYTES
    return RowClass(problem=_relaid(problem, _BASE + step, units))


def _relaid(problem: Problem, m: int, units: Units) -> Problem:
    fields: dict[str, Any] = {}
    extra = list(problem.epilogue.operands) if problem.epilogue is not None else []
    for place, layout in _operands(problem):
        unit = _rows_of_one(problem, place, layout, units)
        if unit is None:
            continue
        # Strides that span all rows change with them.
        scaled, old, rows = _over_rows(layout), layout.size[-2], -(-m // unit)
        stride = tuple(s // old * rows if dim in scaled else s for dim, s in enumerate(layout.stride))
        moved = dataclasses.replace(layout, size=(*layout.size[:-2], rows, layout.size[-1]), stride=stride)
        if place.startswith("#"):
            extra[int(place[1:])] = moved
        else:
            fields[place] = moved
    if problem.epilogue is not None:
        fields["epilogue"] = dataclasses.replace(problem.epilogue, operands=tuple(extra))
    return dataclasses.replace(problem, **fields)


def _operands(problem: Problem) -> Iterator[tuple[str, Layout]]:
    """Yield every layout with its place: a role, ``out``, or ``#0`` for the first operand of the epilogue."""
    yield "out", problem.out
    yield from problem.operands
    for i, layout in enumerate(problem.epilogue.operands if problem.epilogue is not None else ()):
        yield f"#{i}", layout


def _may_broadcast(place: str) -> bool:
    return place in _BROADCAST or place.startswith("#")


def _rows_of_one(problem: Problem, place: str, layout: Layout, units: Units) -> int | None:
    """Return the number of result rows that one row of the operand serves. None if its size does not follow M."""
    if place in ("a", "c", "out"):
        return 1
    if not _may_broadcast(place) or len(layout.size) < 2:
        return None
    for known, unit in units:
        if known == place:
            return unit
    if place == "scale_a":
        block = problem.scale_block(place)[0]
        return None if layout.numel == 1 else block
    return 1 if layout.size[-2] == problem.m else None


def _over_rows(layout: Layout) -> frozenset[int]:
    """Return the dimensions whose stride is a multiple of the number of rows because they are packed densely around the rows."""
    last = len(layout.size) - 1
    others = [dim for dim in range(last + 1) if dim != last - 1 and (dim != last or layout.size[dim] > 1)]
    reach, found = layout.size[-2] * layout.stride[-2], set()
    for dim in sorted(others, key=lambda dim: layout.stride[dim]):
        if reach and layout.stride[dim] == reach:
            found.add(dim)
            reach *= layout.size[dim]
    return frozenset(found)


def _strides_have_rows(problem: Problem, units: Units = ()) -> bool:
    """Return True if M is part of a column stride, which affects alignment. A stride between matrices of a batch does not count."""
    return any(
        len(layout.size) - 1 in _over_rows(layout)
        for place, layout in _operands(problem)
        if _rows_of_one(problem, place, layout, units) is not None
    )


def with_groups(problem: Problem, groups: int) -> Problem:
    """Return a product of groups of rows with fewer groups: the first matrices and scales of b, and as many rows."""
    changed = {
        name: dataclasses.replace(layout, size=(groups, *layout.size[1:]))
        for name in ("b", "scale_b", "offs")
        if (layout := getattr(problem, name)) is not None
    }
    return dataclasses.replace(problem, **changed)


def with_columns(problem: Problem, columns: int) -> Problem:
    """Return a product without groups with fewer columns: those of packed row-major or column-major operands."""

    def fewer(layout: Layout) -> Layout:
        size = (*layout.size[:-1], columns) if layout.size[-1] == problem.n else layout.size
        stride = tuple(columns if s == problem.n and dim != len(size) - 1 else s for dim, s in enumerate(layout.stride))
        return dataclasses.replace(layout, size=size, stride=stride)

    roles = ("b", "scale_b", "zero_b", "inp", "out")
    changed: dict[str, Any] = {name: fewer(x) for name in roles if (x := getattr(problem, name)) is not None}
    return dataclasses.replace(problem, **changed)
