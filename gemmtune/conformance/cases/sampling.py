"""Which cases a property gets, and which of all cases a sample has.

Sizes, strides and variants are gone through together, each at its own pace, so that a few cases have each of them once and many
cases have each combination. Operations and dtypes are always all there; each begins where the one before has stopped.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...declaration.blocks import KINDS, SIDES, sparsity_of_text
from ...declaration.labels import DTYPES, ROWS, STRIDED
from ...declaration.layouts import PLAIN
from .case import Case
from .forms import form_number, forms_of
from .scope import Level, Scope

T = TypeVar("T")
Size = tuple[int, int, int]
Pair = tuple[str, str]
Variant = str | Mapping[str, Any]

EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257)
"""One below, at and one above the sizes of tiles."""
SHAPES: dict[Level, tuple[Size, ...]] = {
    Level.SMOKE: ((1, 1, 1), (17, 33, 65), (64, 64, 64), (127, 96, 129), (128, 257, 40), (1, 256, 300), (48, 56, 1024)),
    Level.FULL: (
        (3, 7, 2), (16, 8, 16), (33, 129, 257), (255, 65, 63), (256, 256, 256), (8, 16, 4096), (300, 1, 77), (130, 514, 511),
    ),
    Level.EXHAUSTIVE: ((512, 640, 768), (1, 4096, 4096), (16, 1000, 5000), (1000, 1001, 999), (2, 3, 65536)),
}  # fmt: skip
LONG: dict[Level, tuple[Size, ...]] = {
    Level.SMOKE: (),
    Level.FULL: ((65, 31, 1), (96, 96, 2049), (24, 40, 8192)),
    Level.EXHAUSTIVE: ((128, 128, 16384),),
}
"""Further ones that are long along K, or have none of it."""
ADDED = tuple(op for op in STRIDED if ROWS[op].operand("inp") is not None)
"""Operations of strided operands with one that is added."""
UNUSUAL = ("row+8", "col+17", "col@3", "every2", "every3", "rows0", "cols0", "window", "row~0", "col~i", "col+8@5~1")
"""Strides beside the plain ones, of one operand at a time."""
BATCHES = (3, 2)
GROUPS = ("", "1", "7", "33")
"""Numbers of groups, more than there are rows among them."""


def shapes(scope: Scope) -> tuple[Size, ...]:
    """(M, N, K) of the scope's level and those below it."""
    return tuple(size for level in Level if level <= scope.level for size in SHAPES[level])


def long_shapes(scope: Scope) -> tuple[Size, ...]:
    """``shapes``, with more of them long along K."""
    return (*shapes(scope), *(size for level in Level if level <= scope.level for size in LONG[level]))


def fitting(scope: Scope, m: int, n: int, k: int) -> Size:
    """The nearest sizes, not smaller, that the traits allow."""
    traits = scope.traits
    sizes = (-(-max(s, least) // by) * by for s, by, least in zip((m, n, k), traits.multiples, traits.least, strict=True))
    return tuple(sizes)  # type: ignore[return-value]


def in_blocks(text: str, n: int, k: int) -> tuple[int, int]:
    """The nearest sizes, not smaller, that consist of such blocks."""
    kind = sparsity_of_text(text)
    return -(-n // kind.block_n) * kind.block_n, -(-k // kind.block_k) * kind.block_k


def plain_pairs(scope: Scope) -> tuple[Pair, ...]:
    """The pairs of plain row- and column-major strides of a and b that are tested, row-major alone where no other is allowed."""
    names = tuple(name for name in ("row", "col") if name in scope.tested_kinds)
    return tuple(itertools.product(names, names))


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
    total = math.prod(lengths)
    order = sorted(range(len(lengths)), key=lambda axis: -lengths[axis])
    for number in range(start, start + total):
        rest, moved, values = number % total, 0, [0] * len(lengths)
        for axis in order:
            rest, digit = divmod(rest, lengths[axis])
            moved += digit
            values[axis] = moved % lengths[axis]
        yield tuple(values)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Enumerates the cases of a property. What depends on the scope may be given as a function of it.

    ``budget`` is about how many cases smoke, full and exhaustive have, whatever the number of operations and dtypes; each of those
    has one at the least, and above smoke with ``every_pair`` every pair of strides. Sizes are moved to what the traits allow. A
    variant is the field of that name, or several fields of a case. ``admits`` leaves cases out; those that stay go through
    ``finish`` before the scope judges them, and with them the ``further`` cases that a check makes of one.
    """

    budget: tuple[int, int, int]
    shapes: tuple[Size, ...] | Callable[[Scope], Sequence[Size]] = shapes
    pairs: tuple[Pair, ...] | Callable[[Scope], Sequence[Pair]] = plain_pairs
    variants: tuple[Variant, ...] | Callable[[Scope], Sequence[Variant]] = ("",)
    ops: tuple[str, ...] = STRIDED
    dtypes: tuple[str, ...] = tuple(DTYPES)
    every_pair: bool = False
    admits: Callable[[Case], bool] = lambda _: True
    finish: Callable[[Case], Case] = lambda case: case
    further: Callable[[Case], Iterable[Case]] = lambda _: ()

    def __call__(self, name: str, scope: Scope) -> Iterator[Case]:
        """The cases of a scope for the property ``name``, in a fixed order."""
        ops = [op for op in scope.tested_ops if op in self.ops]
        contexts = [(op, dtype) for op in ops for dtype in scope.tested_dtypes(op) if dtype in self.dtypes]
        wanted = self.shapes(scope) if callable(self.shapes) else self.shapes
        pairs = self.pairs(scope) if callable(self.pairs) else self.pairs
        variants = self.variants(scope) if callable(self.variants) else self.variants
        sizes = list(dict.fromkeys(fitting(scope, *size) for size in wanted))
        count = max(1, self.budget[scope.level - 1] // max(len(contexts), 1))
        if self.every_pair and scope.level > Level.SMOKE:
            count = max(count, len(pairs))
        for number, (op, dtype) in enumerate(contexts):
            start = number * count
            plain = Case(property_name=name, op=op, dtype=dtype, m=0, n=0, k=0)
            allowed = (
                case
                for i, (size, pair, variant) in enumerate(covering(len(sizes), len(pairs), len(variants), start=start))
                if (case := self._case(scope, start + i, plain, sizes[size], pairs[pair], variants[variant]))
            )
            yield from itertools.islice(allowed, count)

    def _case(self, scope: Scope, number: int, plain: Case, size: Size, pair: Pair, variant: Variant) -> Case | None:
        """None where the scope does not have it. What is left open by the axes goes round with ``number``."""
        (m, n, k), (a, b), traits = size, pair, scope.traits
        fields: dict[str, Any] = {"variant": variant} if isinstance(variant, str) else {}
        if plain.row.sparse:
            sides = traits.blocks or SIDES
            kind = KINDS[(number + number // len(sides)) % len(KINDS)]
            fields |= {"blocks": sides[number % len(sides)] + kind}
            b, (n, k) = PLAIN, in_blocks(fields["blocks"], n, k)
        if plain.row.grouped:
            fields["groups"] = GROUPS[number % len(GROUPS)]
        case = plain.changed(m=m, n=n, k=k, a=a, b=b, **fields)
        if case.batched:
            case = case.changed(batch=BATCHES[number % len(BATCHES)])
        if case.added:
            case = case.changed(
                bias=traits.bias[number % len(traits.bias)],
                alpha="general" if traits.alpha else "one",
                beta="general" if traits.beta else "one",
            )
        if case.quantized:
            forms = forms_of(case.op, traits)
            if not forms:
                return None
            case = forms[form_number(number + zlib.crc32(case.property_name.encode()), len(forms))].of(case)
            case = case.changed(k=case.k + case.k % 2) if case.packed else case
        if case.row.second == "K2" and k:  # equal to K, longer and shorter in turn
            by = traits.multiples[2]
            case = case.changed(k2=("", str(2 * k + by), str(max(k // 2 // by * by, by)))[number % 3])
        if not self.admits(case):
            return None
        case = self.finish(case if isinstance(variant, str) else case.changed(**variant))
        if "~" in case.a + case.b + case.out + case.inp and not case.batched:
            return None
        return case if all(scope.allows(x) for x in (case, *self.further(case))) else None


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
