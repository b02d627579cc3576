"""Which cases a property gets: a sample over operations, dtypes, strides, sizes and variants that fits a budget.

Sizes, strides and variants are gone through together, each at its own pace, so that a few cases have each of them once and many
cases have each combination. Operations and dtypes are always all there; each begins where the one before has stopped.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...dispatch.fused import NAMES
from ..cases.case import Case
from ..cases.forms import form_number, forms_of
from ..cases.scope import Level, Scope
from ..cases.sizes import fitting, plain_pairs, shapes
from ..labels import DTYPES, OPS

__all__ = ["ADDED", "UNUSUAL", "Pair", "Sample", "Size", "all_pairs", "covering", "fitted", "long_shapes"]

Size = tuple[int, int, int]
Pair = tuple[str, str]

ADDED = tuple(op for op in OPS if NAMES[op].operand("inp") is not None)
"""Operations with an added operand."""
UNUSUAL = (
    "row+1",
    "row+8",
    "col+17",
    "col@3",
    "every2",
    "rows0",
    "cols0",
    "window",
    "row~0",
    "row~1",
    "col+8@5~1",
)
"""Strides beside the plain ones, of one operand at a time."""
BATCHES = (3, 2)
_LONG: dict[Level, tuple[Size, ...]] = {
    Level.SMOKE: (),
    Level.FULL: ((65, 31, 1), (96, 96, 2049), (24, 40, 8192)),
    Level.EXHAUSTIVE: ((128, 128, 16384),),
}


def long_shapes(scope: Scope) -> list[Size]:
    """``sizes.shapes``, with more of them long along K."""
    more = (size for level in Level if level <= scope.level for size in _LONG[level])
    return list(dict.fromkeys([*shapes(scope), *(fitting(scope, *size) for size in more)]))


def fitted(*sizes: Size) -> Callable[[Scope], list[Size]]:
    """These sizes, moved to what the traits allow."""
    return lambda scope: list(dict.fromkeys(fitting(scope, *size) for size in sizes))


def all_pairs(scope: Scope) -> tuple[Pair, ...]:
    """The plain pairs of strides of a and b; above smoke also each of the unusual ones, of a and of b."""
    plain = plain_pairs(scope)
    if scope.level is Level.SMOKE:
        return plain
    return (*plain, *((text, "row") for text in UNUSUAL), *(("row", text) for text in UNUSUAL))


def covering(*lengths: int, start: int = 0) -> Iterator[tuple[int, ...]]:
    """Every combination of indices below ``lengths`` once, such that all values of each index come up early and together.

    The first max(lengths) have every value of each index.
    """
    total = 1
    for length in lengths:
        total *= length
    order = sorted(range(len(lengths)), key=lambda axis: -lengths[axis])
    for number in range(start, start + total):
        rest, moved, values = number % total, 0, [0] * len(lengths)
        for axis in order:
            rest, digit = divmod(rest, lengths[axis])
            moved += digit
            values[axis] = moved % lengths[axis]
        yield tuple(values)


def second_k(k: int, number: int, multiple: int) -> str:
    """K2 as a case has it: equal to K, longer and shorter in turn."""
    longer, shorter = 2 * k + multiple, max(k // 2 // multiple * multiple, multiple)
    return ("", str(longer), str(shorter))[number % 3] if k else ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Enumerates the cases of a property; it is what ``Property.cases`` is.

    ``budget`` is about how many cases smoke, full and exhaustive have, whatever the number of operations and dtypes; each of those
    has one at the least, and above smoke with ``every_pair`` every pair of strides. ``admits`` leaves cases out; those that stay go
    through ``finish`` before the scope judges them.
    """

    name: str
    budget: tuple[int, int, int]
    shapes: Callable[[Scope], Sequence[Size]] = shapes
    pairs: Callable[[Scope], Sequence[Pair]] = plain_pairs
    variants: tuple[str, ...] = ("",)
    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    every_pair: bool = False
    admits: Callable[[Case], bool] = lambda _: True
    finish: Callable[[Case], Case] = lambda case: case

    def __call__(self, scope: Scope) -> Iterator[Case]:
        """The cases of a scope, in a fixed order."""
        ops = [op for op in scope.tested_ops if op in self.ops]
        contexts = [(op, dtype) for op in ops for dtype in scope.tested_dtypes(op) if dtype in self.dtypes]
        sizes, pairs = self.shapes(scope), self.pairs(scope)
        count = max(1, self.budget[scope.level - 1] // max(len(contexts), 1))
        if self.every_pair and scope.level > Level.SMOKE:
            count = max(count, len(pairs))
        for number, (op, dtype) in enumerate(contexts):
            start = number * count
            allowed = (
                case
                for i, (size, pair, variant) in enumerate(covering(len(sizes), len(pairs), len(self.variants), start=start))
                if (case := self._case(scope, start + i, op, dtype, sizes[size], pairs[pair], self.variants[variant]))
            )
            yield from itertools.islice(allowed, count)

    def _case(self, scope: Scope, number: int, op: str, dtype: str, size: Size, pair: Pair, variant: str) -> Case | None:
        """None where the scope does not have it. What is left open by the axes goes round with ``number``."""
        (m, n, k), (a, b), traits = size, pair, scope.traits
        case = Case(property_name=self.name, op=op, dtype=dtype, m=m, n=n, k=k, a=a, b=b, variant=variant)
        if case.batched:
            case = case.changed(batch=BATCHES[number % len(BATCHES)])
        elif "~" in a + b:
            return None
        if case.added:
            case = case.changed(
                bias=traits.bias[number % len(traits.bias)],
                alpha="general" if traits.alpha else "one",
                beta="general" if traits.beta else "one",
            )
        if case.quantized:
            forms = forms_of(op, traits)
            if not forms:
                return None
            case = forms[form_number(number + zlib.crc32(self.name.encode()), len(forms))].of(case)
            case = case.changed(k=case.k + case.k % 2) if case.packed else case
        if NAMES[op].second == "K2":
            case = case.changed(k2=second_k(k, number, traits.multiples[2]))
        if not self.admits(case):
            return None
        case = self.finish(case)
        return case if scope.allows(case) else None
