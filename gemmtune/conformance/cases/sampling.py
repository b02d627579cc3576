"""Enumeration of the cases of a property, and sampling among all cases.

Sizes, strides and variants advance together, each at its own pace. A few cases thus have each value once, and many cases have each
combination. Every operation with each of its dtypes always occurs. Each starts where the previous one stopped.
"""

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...declaration.labels import BLOCK_KINDS, BLOCK_SIDES, DTYPES, ROWS, STRIDED, plain_scales, sparsity_of_text
from ...declaration.layouts import PLAIN
from .case import Case
from .forms import PLAIN_FORMS, form_number, forms_of
from .scope import Level, Scope

T = TypeVar("T")
Size = tuple[int, int, int]
Pair = tuple[str, str]
Variant = str | Mapping[str, Any]

EDGES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257)
"""Sizes one below, at and one above the sides of tiles."""
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
"""Further sizes with a long K, or with almost none."""
ADDED = tuple(op for op in STRIDED if ROWS[op].operand("inp") is not None)
"""Strided operations that have an added operand."""
UNUSUAL = ("row+8", "col+17", "col@3", "every2", "every3", "rows0", "cols0", "window", "row~0", "col~i", "col+8@5~1")
"""Strides other than plain ones, for one operand at a time."""
BATCHES = (3, 2)
GROUPS = ("", "1", "7", "33")
"""Numbers of groups. The largest one exceeds the rows of small cases."""
EACH = ("2", "", "3")
"""Numbers of rows that are added up to one."""


def residues(base: int) -> tuple[Size, ...]:
    """Return sizes above ``base`` that leave every remainder of 16 in each dimension. Tails of vectors differ by remainder."""
    return tuple((base + i, base + 1 + (7 * i + 3) % 16, base + 1 + (11 * i + 6) % 16) for i in range(1, 17))


def shapes(scope: Scope) -> tuple[Size, ...]:
    """Return (M, N, K) of the scope's level and of the levels below it."""
    return tuple(size for level in Level if level <= scope.level for size in SHAPES[level])


def long_shapes(scope: Scope) -> tuple[Size, ...]:
    """Return ``shapes`` and further sizes with a long K."""
    return (*shapes(scope), *(size for level in Level if level <= scope.level for size in LONG[level]))


def fitting(scope: Scope, m: int, n: int, k: int) -> Size:
    """Return the smallest sizes that the traits allow and that are not below the given ones."""
    traits = scope.traits
    sizes = (-(-max(s, least) // by) * by for s, by, least in zip((m, n, k), traits.multiples, traits.least, strict=True))
    return tuple(sizes)  # type: ignore[return-value]


def in_blocks(text: str, n: int, k: int) -> tuple[int, int]:
    """Return the smallest (N, K) that whole blocks fill and that are not below the given ones."""
    kind = sparsity_of_text(text)
    return -(-n // kind.block_n) * kind.block_n, -(-k // kind.block_k) * kind.block_k


def plain_pairs(scope: Scope) -> tuple[Pair, ...]:
    """Return the tested pairs of plain strides of a and b: row- and column-major, or row-major alone."""
    names = tuple(name for name in ("row", "col") if name in scope.tested_kinds)
    return tuple(itertools.product(names, names))


def all_pairs(scope: Scope) -> tuple[Pair, ...]:
    """Return the plain pairs of strides of a and b. Above smoke, add each unusual layout of a and of b."""
    plain = plain_pairs(scope)
    if scope.level is Level.SMOKE:
        return plain
    return (*plain, *((text, "row") for text in UNUSUAL), *(("row", text) for text in UNUSUAL))


def covering(*lengths: int, start: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield each combination of indices below ``lengths`` once. The first max(lengths) contain every value of each index."""
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
    """Enumeration of the cases of a property. Fields that depend on the scope may be functions of it.

    ``budget`` is the approximate number of cases at smoke, full and exhaustive, for any number of operations and dtypes. Each
    operation with each dtype gets at least ``least``. With ``every_pair`` it gets every pair of strides, above smoke. Sizes grow to
    what the traits allow. A variant is the field of that name, or a mapping of several fields of a case. ``admits`` drops cases.
    ``finish`` changes the others before the scope checks them, together with the ``further`` cases that a check derives.
    """

    budget: tuple[int, int, int]
    shapes: tuple[Size, ...] | Callable[[Scope], Sequence[Size]] = shapes
    pairs: tuple[Pair, ...] | Callable[[Scope], Sequence[Pair]] = plain_pairs
    variants: tuple[Variant, ...] | Callable[[Scope], Sequence[Variant]] = ("",)
    ops: tuple[str, ...] = STRIDED
    dtypes: tuple[str, ...] = tuple(DTYPES)
    every_pair: bool = False
    least: int = 1
    admits: Callable[[Case], bool] = lambda _: True
    finish: Callable[[Case], Case] = lambda case: case
    further: Callable[[Case], Iterable[Case]] = lambda _: ()

    def __call__(self, name: str, scope: Scope) -> Iterator[Case]:
        """Yield the cases of a scope for the property ``name``, in a fixed order."""
        ops = [op for op in scope.tested_ops if op in self.ops]
        contexts = [(op, dtype) for op in ops for dtype in scope.tested_dtypes(op) if dtype in self.dtypes]
        wanted = self.shapes(scope) if callable(self.shapes) else self.shapes
        pairs = self.pairs(scope) if callable(self.pairs) else self.pairs
        variants = self.variants(scope) if callable(self.variants) else self.variants
        sizes = list(dict.fromkeys(fitting(scope, *size) for size in wanted))
        count = max(self.least, self.budget[scope.level - 1] // max(len(contexts), 1))
        if self.every_pair and scope.level > Level.SMOKE:
            count = max(count, len(pairs))
        for number, (op, dtype) in enumerate(contexts):
            start = number * count
            plain = Case(property_name=name, op=op, dtype=dtype, m=0, n=0, k=0, scales=plain_scales(op))
            allowed = (
                case
                for i, (size, pair, variant) in enumerate(covering(len(sizes), len(pairs), len(variants), start=start))
                if (case := self._case(scope, start + i, plain, sizes[size], pairs[pair], variants[variant]))
            )
            yield from itertools.islice(allowed, count)

    def _case(self, scope: Scope, number: int, plain: Case, size: Size, pair: Pair, variant: Variant) -> Case | None:
        """Return one case, or None if the scope excludes it. ``number`` cycles through the fields that no axis sets."""
        (m, n, k), (a, b), traits, row = size, pair, scope.traits, plain.row
        fields: dict[str, Any] = {"variant": variant} if isinstance(variant, str) else {}
        if row.sparse:
            sides = traits.blocks or BLOCK_SIDES
            kind = BLOCK_KINDS[(number + number // len(sides)) % len(BLOCK_KINDS)]
            fields |= {"blocks": sides[number % len(sides)] + kind}
            b, (n, k) = PLAIN, in_blocks(fields["blocks"], n, k)
        if row.grouped:
            fields["groups"] = GROUPS[number % len(GROUPS)]
        if row.batched:
            fields["batch"] = BATCHES[number % len(BATCHES)]
        if plain.added:
            fields |= {
                "bias": traits.bias[number % len(traits.bias)],
                "alpha": "general" if traits.alpha else "one",
                "beta": "general" if traits.beta else "one",
            }
        forms = forms_of(plain.op, traits)
        if not forms:
            return None
        if forms != PLAIN_FORMS:
            form = forms[form_number(number + zlib.crc32(plain.property_name.encode()), len(forms))]
            fields |= form.fields(plain.dtype, m)
            fields |= _routed(plain, fields["tokens"], m, number // len(forms))
        if row.second == "K2" and k:  # K2 equals K with equal strides, or other ones, and is longer and shorter than K
            by = traits.multiples[2]
            fields["k2"] = ("", str(2 * k + by), str(max(k // 2 // by * by, by)), str(k))[number % 4]
        case = plain.changed(m=m, n=n, k=k, a=a, b=b, **fields)  # once, because each change checks all fields
        if k % case.step_of_k:
            case = case.changed(k=k + -k % case.step_of_k)
        if not self.admits(case):
            return None
        case = self.finish(case if isinstance(variant, str) else case.changed(**variant))
        if "~" in case.a + case.b + case.out + case.inp and not case.batched:
            return None
        return case if all(scope.allows(x) for x in (case, *self.further(case))) else None


def _routed(plain: Case, tokens: str, m: int, number: int) -> dict[str, str]:
    """Return the ``number``-th count of rows that are picked from, fewer or more than M, or of those that are added up."""
    if tokens:
        return {"tokens": str((max(m // 2, 1), m, 2 * m + 3)[number % 3])}
    return {"each": EACH[number % len(EACH)]} if plain.row.operand("weights") is not None else {}


def sample_order(cases: Iterable[Case], *, seed: int) -> list[Case]:
    """Return the cases, properties and then their operations and dtypes in turn, so that every prefix is a sample."""
    by_property: dict[str, dict[tuple[str, str], list[Case]]] = {}
    for case in cases:
        by_property.setdefault(case.property_name, {}).setdefault((case.op, case.dtype), []).append(case)
    turns = []
    for number, (name, by_kind) in enumerate(by_property.items()):
        for kind, group in by_kind.items():
            random.Random(f"{seed} {name} {kind}").shuffle(group)
        first = number % len(by_kind)  # each property starts at another operation and dtype
        groups = list(by_kind.values())
        turns.append(list(_in_turn(groups[first:] + groups[:first])))
    return list(_in_turn(turns))


def _in_turn(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield the first item of each list, then the second of each list that has one, and so on."""
    missing = object()
    for row in itertools.zip_longest(*lists, fillvalue=missing):
        yield from (item for item in row if item is not missing)  # type: ignore[misc]
