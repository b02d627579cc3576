"""A property: what is asserted of every GEMM, by which check, on which cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..bench.bench import Bench
from ..cases.case import Case
from ..cases.scope import Scope

__all__ = ["Check", "Property"]

Check: TypeAlias = Callable[[Bench], None]
"""Calls the GEMM of a bench for its case and states what it expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """One row of the suite's table.

    ``needs`` gives the reason why the property is not tested within a scope (something undeclared, no such device), None if it is.
    ``cases`` are those of the scope's level in a fixed order; ``drawn`` says whether hypothesis may draw further ones, by changing
    sizes, strides, dtype and seed of those.
    """

    name: str
    meaning: str
    check: Check
    cases: Callable[[Scope], Iterable[Case]]
    needs: Callable[[Scope], str | None] = lambda _: None
    drawn: bool = False
