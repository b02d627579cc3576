"""How to go through a product: the blockings that are worth trying, by how many rows there are, of what, and where b is.

``kc`` is in steps of K, ``task_m`` and ``task_n`` in panels. All of this was measured; what is not legal for a problem is refused
elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Problem
from .operands import oriented

__all__ = ["Blocking", "Mode", "blockings"]

Mode = Literal["steps", "columns", "dots"]


@dataclass(frozen=True, slots=True)
class Blocking:
    """The part of a ``Config`` that the compiler does not see; what the fields mean is said there."""

    mode: Mode
    kc: int
    task_m: int
    task_n: int
    direct: bool = False


_DOTS = (Blocking("dots", 4096, 8, 1), Blocking("dots", 512, 8, 1), Blocking("dots", 1024, 8, 4))
_IN_PLACE = (Blocking("columns", 128, 8, 4, True), Blocking("columns", 512, 8, 2, True))
_WIDE_IN_PLACE = (Blocking("columns", 8, 8, 64, True), Blocking("columns", 8, 8, 16, True))
"""Row-major b, so many whole rows at a time: as long as possible in each page."""
_WIDE_NARROW_IN_PLACE = (
    Blocking("columns", 8, 8, 64, True), Blocking("columns", 128, 8, 64, True), Blocking("columns", 32, 8, 16, True),
)  # fmt: skip
"""The same for numbers of 8 or 4 bits, in which the scales of a group are read for each visit."""
_PACKED = (Blocking("columns", 512, 8, 1), Blocking("columns", 256, 8, 4), Blocking("columns", 128, 8, 1))
_FEW_ROWS = (*_DOTS, *_WIDE_IN_PLACE, *_IN_PLACE, *_PACKED)
_FEW_ROWS_NARROW = (*_DOTS, *_WIDE_NARROW_IN_PLACE, *_IN_PLACE, *_PACKED)
_FEW_ROWS_PREPACKED = (
    Blocking("columns", 4096, 8, 1, True), Blocking("columns", 512, 8, 1, True), Blocking("columns", 256, 8, 2, True),
    Blocking("columns", 1024, 8, 4, True),
)  # fmt: skip
_MANY_ROWS = (
    Blocking("columns", 1024, 8, 4), Blocking("steps", 512, 16, 4), Blocking("columns", 512, 16, 4),
    Blocking("steps", 1024, 8, 4), Blocking("columns", 256, 16, 2), Blocking("steps", 256, 4, 2),
)  # fmt: skip
"""B and A are packed; the copies are used often enough to be worth it."""
_MANY_ROWS_IN_PLACE = (
    Blocking("columns", 1024, 8, 4, True), Blocking("steps", 512, 16, 4, True), Blocking("columns", 512, 16, 2, True),
    Blocking("steps", 256, 4, 2, True),
)  # fmt: skip

_INT8_FEW_ROWS = (
    Blocking("dots", 1024, 8, 4), Blocking("dots", 1024, 8, 1), Blocking("columns", 128, 8, 64), Blocking("columns", 32, 8, 64),
    Blocking("columns", 128, 8, 1), Blocking("columns", 512, 8, 1),
)  # fmt: skip
_INT8_MANY_ROWS = (
    Blocking("columns", 256, 32, 32), Blocking("columns", 512, 32, 16), Blocking("steps", 256, 32, 8),
    Blocking("columns", 512, 8, 1), Blocking("columns", 512, 16, 4), Blocking("steps", 512, 16, 4),
)  # fmt: skip
"""Products of int8 take a fourth of the time and of the memory: packing weighs more, so neighbouring panels are packed together."""

_TASKS_PER_THREAD = 2
"""At least so many, where there are enough columns: a thread that was held up then leaves work to the others."""
_FEW_PANELS = 4
"""Up to so many panels of a, reading b costs as much as the arithmetic."""


def blockings(problem: Problem, device: DeviceInfo, mr: int, nr: int, *, everything: bool) -> list[Blocking]:
    """Blockings for the problem, most promising first. Some are not legal for it."""
    x = oriented(problem, nr)
    panels, threads = -(-x.b.size[-1] // nr), max(device.threads, 1)
    few = _few_rows(problem, max(1, -(-panels // threads)))
    many = _many_rows(problem, max(1, panels // (_TASKS_PER_THREAD * threads)))
    if everything:
        return [*few, *many, *_every_blocking()]
    return [*few, *many[:2]] if x.a.size[-2] <= _FEW_PANELS * mr else many


def _few_rows(problem: Problem, most: int) -> list[Blocking]:
    """Blockings for few rows, with ``most`` panels of b in a task at most: every thread is to have one."""
    if problem.prepacked:
        found: Sequence[Blocking] = _FEW_ROWS_PREPACKED
    elif problem.accumulator == torch.int32:
        found = _INT8_FEW_ROWS
    else:
        found = _FEW_ROWS_NARROW if problem.b.dtype.itemsize == 1 else _FEW_ROWS
    return _shared_out(found, most)


def _many_rows(problem: Problem, most: int) -> list[Blocking]:
    in_place = _MANY_ROWS_IN_PLACE if problem.prepacked else ()
    packed = _INT8_MANY_ROWS if problem.accumulator == torch.int32 else _MANY_ROWS
    return _shared_out((*in_place, *packed), most)


def _shared_out(found: Iterable[Blocking], most: int) -> list[Blocking]:
    """Tasks of ``columns`` made small enough; the others share the work in smaller pieces."""
    return [replace(blocking, task_n=min(blocking.task_n, most)) if blocking.mode == "columns" else blocking for blocking in found]


def _every_blocking() -> Iterator[Blocking]:
    modes: tuple[Mode, ...] = ("steps", "columns")
    for mode, kc in itertools.product(modes, (128, 256, 512, 1024, 2048, 4096)):
        for (task_m, task_n), direct in itertools.product(((4, 1), (4, 4), (8, 2), (8, 8), (16, 4), (32, 2)), (False, True)):
            yield Blocking(mode, kc, task_m, task_n, direct)
