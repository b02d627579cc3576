"""Diagnoses from the map of errors alone: unwritten elements, misplaced NaN and infinities, addresses that wrap at 32 bits."""

import itertools

import torch

from ...problem.dtypes import dtype_info
from .evidence import Evidence

MOST_TAME = 64.0
"""Magnitude of operands below which sums of up to 15 products never overflow, even in float16. Longer signed sums rarely do."""


def _with_place(text: str, mask: torch.Tensor) -> str:
    """Return ``text`` followed by the place of the mask, if it has one."""
    where = place(mask)
    return f"{text} in {where}" if where else text


def first_sign(evidence: Evidence) -> str:
    """Return the diagnosis that is certain for any operands, or an empty text."""
    bad, got, expected = evidence.bad, evidence.got, evidence.expected
    if bool((evidence.unwritten == bad).all()):
        return _with_place("elements left unwritten", bad)
    if _reads_ignored(evidence):
        return "C is read although beta is 0"
    lost = expected.isnan() & ~got.isnan()
    if bool((lost == bad).all()):
        return _with_place("NaN swallowed", lost)
    least = dtype_info(evidence.problem.out.dtype).smallest_normal
    if bool((((got == 0) & (expected != 0) & (expected.abs() < least)) == bad).all()):
        return "subnormal numbers became 0"
    for earlier in evidence.earlier if int(bad.sum()) > 1 else ():
        if bool(((got == earlier) | (got.isnan() & earlier.isnan())).all()):
            return "the result of an earlier call"
    return ""


def last_sign(evidence: Evidence) -> str:
    """Return the diagnosis of a result that no known bug gives, or an empty text."""
    bad, got, expected = evidence.bad, evidence.got, evidence.expected
    largest = dtype_info(evidence.problem.out.dtype).largest
    # Memory around the operands holds only NaN. "tame": sums of these operands are far from overflow.
    tame = all(bool((x.double().abs() < MOST_TAME).all()) for x in (evidence.operands.a, evidence.operands.b))
    if bool((evidence.unwritten & bad).any()):
        return _with_place("elements left unwritten", evidence.unwritten & bad)
    for text, mask in (
        ("infinity became the largest finite number", expected.isinf() & (got == largest * expected.sign())),
        ("infinity became NaN", expected.isinf() & got.isnan()),
        ("infinity lost", expected.isinf() & got.isfinite()),
        ("NaN became infinity", expected.isnan() & got.isinf()),
        ("NaN, as if memory outside of the operands were read", got.isnan() & expected.isfinite() & tame),
        ("NaN where there should be none", expected.isfinite() & got.isnan()),
        ("overflow to infinity", expected.isfinite() & got.isinf()),
        ("zeros", (got == 0) & expected.isfinite() & (expected != 0)),
    ):
        if bool(mask.any()) and bool((mask == bad).all()):
            return _with_place(text, mask)
    return _wrapped(evidence)


def errors_in(evidence: Evidence) -> str:
    """Return the place of the errors, or an empty text if they are not in one place."""
    where = place(evidence.bad)
    return f"errors only in {where}" if where and int(evidence.bad.sum()) > 1 else ""


def _reads_ignored(evidence: Evidence) -> bool:
    """Return True if NaN or infinities are exactly where the added operand has them, which beta = 0 must not read."""
    inp = evidence.operands.inp
    if evidence.problem.beta != "zero" or inp is None or not inp.numel():
        return False
    special = ~inp.expand(evidence.problem.out.size).isfinite().reshape(evidence.bad.shape)
    spoilt = evidence.bad & ~evidence.got.isfinite()
    forbidden = special & evidence.expected.isfinite()
    return bool(special.any()) and bool((spoilt == forbidden).all()) and bool((spoilt == evidence.bad).all())


def _wrapped(evidence: Evidence) -> str:
    """Return the diagnosis of errors that begin at the row or column whose offset in an operand passes 2^31."""
    problem, bad = evidence.problem, evidence.bad
    lines = {"a": (bad.any(-1).any(0), 0), "b": (bad.any(-2).any(0), 1)}
    for name, layout in (("a", problem.a), ("b", problem.b), ("out", problem.out)):
        for wrong, dim in (lines[name],) if name in lines else lines.values():
            first, step = int(wrong.to(torch.uint8).argmax()), layout.stride[-2 + dim]
            # Largest offsets in the line before the first wrong one, and in that one.
            rest = layout.span - 1 - (layout.size[-2 + dim] - 1) * step
            before, after = ((line * step + rest) for line in (first - 1, first))
            for unit, itemsize in (("elements", 1), ("bytes", layout.dtype.itemsize)):
                if first and before < 2**31 // itemsize <= after:
                    line = ("row", "column")[dim]
                    return f"errors from {line} {first} on, where offsets in {name} pass 2^31 {unit}: 32-bit addresses"
    return ""


DENSE = 0.25
"""Minimum share of wrong elements within the wrong rows and columns for these to be a place.

With small integers, or with a bug that changes little, some elements are right by chance.
"""
TILES = (256, 128, 64, 32, 16, 8)


def place(bad: torch.Tensor) -> str:
    """Return where a mask (B, M, N) is True, as in ``batch 2, columns 64–95``. Empty: everywhere, or scattered."""
    batch, m, n = bad.shape
    batches, rows, cols = bad.any(-1).any(-1), bad.any(-1).any(0), bad.any(-2).any(0)
    wrong = int(bad.sum())
    within = int(batches.sum()) * int(rows.sum()) * int(cols.sum())
    if not wrong or wrong < DENSE * within:
        return ""
    parts = [
        lines_in_words(batches, "batch", "batches", tail=False) if batch > 1 else "",
        lines_in_words(rows, "row", "rows") if m > 1 else "",
        lines_in_words(cols, "column", "columns") if n > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def lines_in_words(mask: torch.Tensor, one: str, many: str, *, tail: bool = True) -> str:
    """Return the True lines of a dimension in words, or an empty text if all are True or they are scattered."""
    size, found = len(mask), mask.nonzero().flatten().tolist()
    first, last, count = found[0], found[-1], len(found)
    if count == size:
        return ""
    if count == last - first + 1:
        if last == size - 1 and first > 0:
            tiles = (tile for tile in TILES if tail and size % tile and first == size // tile * tile)
            past = "".join(f", past a multiple of {tile}" for tile in itertools.islice(tiles, 1))
            if count == 1:
                return f"the last {one}{past}"
            return f"every {one} but the first" if first == 1 else f"the last {count} of {size} {many}{past}"
        if first == 0:
            return f"the first {one}" if count == 1 else f"the first {count} of {size} {many}"
        return f"{one} {first}" if count == 1 else f"{many} {first}–{last}"
    steps = {after - before for before, after in itertools.pairwise(found)}
    if len(steps) == 1 and count > 2:
        step = steps.pop()
        if first - step < 0 and last + step >= size:
            ending = "th" if 10 <= step % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
            return f"every {step}{ending} {one} from {first}"
    for tile in reversed(TILES) if tail else ():  # the same part of each tile
        if tile <= size // 2 and bool((mask[tile:] == mask[:-tile]).all()):
            part = [line for line in found if line < tile]
            return f"{many} {part[0]}–{part[-1]} of every {tile}" if part[-1] - part[0] + 1 == len(part) else ""
    return ""
