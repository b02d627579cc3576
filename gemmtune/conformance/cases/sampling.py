"""A sample of cases in which every property, operation and dtype has its part, however small it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from .case import Case

__all__ = ["sample_order"]

T = TypeVar("T")


def sample_order(cases: Iterable[Case], *, seed: int) -> list[Case]:
    """The cases in an order of which each first part is a sample: properties take turns, and within each its operations and dtypes.

    The same for the same cases and seed, in every process.
    """
    by_property: dict[str, dict[tuple[str, str], list[Case]]] = {}
    for case in cases:
        by_property.setdefault(case.property_name, {}).setdefault((case.op, case.dtype), []).append(case)
    turns = []
    for number, (name, by_kind) in enumerate(by_property.items()):
        for kind, group in by_kind.items():
            random.Random(f"{seed} {name} {kind}").shuffle(group)
        first = number % len(by_kind)  # so that a case of each property is not a case of the same operation for all
        groups = list(by_kind.values())
        turns.append(list(_in_turn(groups[first:] + groups[:first])))
    return list(_in_turn(turns))


def _in_turn(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """The first of each list, then the second of each that has one, and so on."""
    missing = object()
    for row in itertools.zip_longest(*lists, fillvalue=missing):
        yield from (item for item in row if item is not missing)  # type: ignore[misc]
