"""Known bugs of grouped products, each as a change of operands, of offsets or of the problem that gives the same result."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...numerics.operands import Operands
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ...problem.grouped_compositions import GATES, spans

Tensor = torch.Tensor
Pieces = Sequence[tuple[int, int]]
TILES = (4, 8, 16, 32, 64, 128)
"""Sides of tiles at which a kernel may begin or end groups, and lengths of K blocks that it may drop."""
TAILS = (1, 2, *TILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Call as a bug sees it: the right product of other operands, with other beginnings and ends of groups."""

    text: str
    operands: Operands
    pieces: Pieces
    problem: Problem | None = None


def changes(
    problem: Problem, operands: Operands, pieces: Pieces, earlier_ends: Sequence[Sequence[int]], total: int
) -> Iterator[Change]:
    """Yield the change of each known bug, certain and cheap ones first."""
    if not problem.divides_terms:
        yield from _of_matrices(operands, pieces)
    yield from _of_offsets(problem, operands, pieces, earlier_ends, total)
    yield from _of_scales(problem, operands, pieces)
    yield from _of_encodings(operands, pieces)
    yield from _of_routes(problem, operands, pieces)
    yield from _of_terms(problem, operands, pieces)
    yield from _of_numbers(operands, pieces)


def _with(operands: Operands, pieces: Pieces, text: str, **fields: object) -> Change:
    """Return the change to operands with other fields."""
    return Change(text=text, operands=dataclasses.replace(operands, **fields), pieces=pieces)  # type: ignore[arg-type]


def _of_offsets(
    problem: Problem, operands: Operands, pieces: Pieces, earlier_ends: Sequence[Sequence[int]], total: int
) -> Iterator[Change]:
    def moved(text: str, change: Callable[[int, int], tuple[int, int]]) -> Change:
        found = [change(begin, end) for begin, end in pieces]
        return Change(text=text, operands=operands, pieces=[(max(b, 0), max(0, min(e, total))) for b, e in found])

    line = "term" if problem.divides_terms else "row"
    ends = [end for _, end in pieces]
    yield moved(f"groups begin and end one {line} early", lambda begin, end: (begin - 1, end - 1))
    yield moved(f"groups begin and end one {line} late", lambda begin, end: (begin + 1, end + 1))
    yield Change(text="offsets read as sizes of groups", operands=operands, pieces=spans(list(itertools.accumulate(ends)), total))
    for earlier in earlier_ends:
        yield Change(text="offsets of an earlier call", operands=operands, pieces=spans(earlier, total))
    yield Change(
        text=f"{line}s behind the last group taken for its own", operands=operands, pieces=[*pieces[:-1], (pieces[-1][0], total)]
    )
    for tile in TILES:
        yield moved(f"groups begin at multiples of {tile}", lambda begin, end, tile=tile: (begin // tile * tile, end))  # type: ignore[misc]
    if problem.divides_terms:
        yield moved("first term of the next group added", lambda begin, end: (begin, end + 1))
        yield moved("first term of groups dropped", lambda begin, end: (begin + 1, end))
        yield Change(text="results in the places of the next groups", operands=operands, pieces=[*pieces[-1:], *pieces[:-1]])
        yield Change(text="results in the places of the groups before", operands=operands, pieces=[*pieces[1:], *pieces[:1]])
        yield Change(text="last group left out", operands=operands, pieces=[*pieces[:-1], (0, 0)])


def _of_matrices(operands: Operands, pieces: Pieces) -> Iterator[Change]:
    groups, device = operands.b.shape[0], operands.b.device
    every = torch.arange(groups, device=device)
    starts = torch.tensor([begin for begin, _ in pieces], device=device)
    orders = [
        ("of the next group", (every + 1) % groups),
        ("of the group before", (every - 1) % groups),
        ("of the first group used for all", torch.zeros_like(every)),
        ("of the last group used for all", torch.full_like(every, groups - 1)),
    ]
    for tile in TILES:
        orders.append(
            (f"of the group before where a group begins within a tile of {tile}", (every - (starts % tile != 0).long()) % groups)
        )
    for where, order in orders:
        b = _at(operands.b, order)
        scale = None if operands.scale_b is None else operands.scale_b[order]
        if scale is not None:
            yield _with(operands, pieces, f"scale_b {where}", scale_b=scale)
            yield _with(operands, pieces, f"matrix without its scales {where}", b=b)
        yield _with(operands, pieces, f"matrix {where}", b=b, scale_b=scale)


def _of_scales(problem: Problem, operands: Operands, pieces: Pieces) -> Iterator[Change]:
    for name, along, across in (("scale_a", 1, 0), ("scale_b", -2, -1)):
        scale: Tensor | None = getattr(operands, name)
        if scale is None:
            continue

        def with_scale(text: str, other: Tensor, name: str = name) -> Change:
            return _with(operands, pieces, f"{name} {text}", **{name: other})

        yield with_scale("dropped", torch.ones_like(scale))
        yield with_scale("applied twice", scale * scale)
        yield with_scale("read as bfloat16", scale.bfloat16().to(scale.dtype))
        if scale.shape[along] > 1:
            yield with_scale("of the next block along K", scale.roll(-1, along))
            yield with_scale("of the block before along K", scale.roll(1, along))
            yield with_scale("of the first block used all along K", scale.narrow(along, 0, 1).expand_as(scale))
        if scale.shape[across] > 1:
            yield with_scale("of the next one across", scale.roll(-1, across))
            yield with_scale("of the one before across", scale.roll(1, across))
            yield with_scale("of the first one used for all across", scale.narrow(across, 0, 1).expand_as(scale))
    if operands.scale_a is not None and operands.rows is None and not problem.divides_terms:
        moved = _within_groups(operands.scale_a, pieces)
        text = "scale_a of the row's number within its group"
        yield _with(operands, pieces, text, scale_a=moved)


def _within_groups(x: Tensor, pieces: Pieces) -> Tensor:
    """Return rows of x by the number of each row within its group, as if x began anew with every group."""
    other = x.clone()
    for begin, end in pieces:
        other[begin:end] = x[: end - begin]
    return other


def _of_encodings(operands: Operands, pieces: Pieces) -> Iterator[Change]:
    b = operands.b
    if operands.encoding:
        swapped = (b << 4) | (b >> 4)
        other = "uint4" if operands.encoding == "int4" else "int4"
        words = "unsigned" if operands.encoding == "int4" else "signed"
        yield _with(operands, pieces, "low and high four bits exchanged", b=swapped)
        yield _with(operands, pieces, f"b read as {words} integers", encoding=other)
    elif b.dtype in (torch.int8, torch.uint8):
        dtype = torch.uint8 if b.dtype == torch.int8 else torch.int8
        words = "unsigned" if b.dtype == torch.int8 else "signed"
        yield _with(operands, pieces, f"b read as {words} integers", b=b.view(dtype))


def _of_routes(problem: Problem, operands: Operands, pieces: Pieces) -> Iterator[Change]:
    changed = functools.partial(_with, operands, pieces)
    if operands.rows is not None:
        last, every = operands.a.shape[0] - 1, torch.arange(problem.m, device=operands.a.device)
        yield changed("row r of a used in place of row rows[r]", rows=every.clamp_max(last))
        yield changed("the next row of a picked", rows=(operands.rows + 1).clamp_max(last))
        yield changed("rows of the index one place late", rows=operands.rows.roll(1))
        yield changed("rows of the index one place early", rows=operands.rows.roll(-1))
    if problem.gated:
        half = problem.n
        yield changed("gates and the other columns exchanged", b=operands.b.roll(half, -1))
        yield changed("gates taken from every second column", b=torch.cat([operands.b[..., ::2], operands.b[..., 1::2]], -1))
        for other in GATES:
            if other != problem.gated:
                instead = dataclasses.replace(problem, gated=other)
                yield Change(text=f"gates by {other} for {problem.gated}", operands=operands, pieces=pieces, problem=instead)
    if operands.slots is not None and operands.weights is not None:
        yield from _of_weights(operands.slots, operands.weights, changed)


def _of_weights(slots: Tensor, weights: Tensor, changed: Callable[..., Change]) -> Iterator[Change]:
    by_row = weights.flatten().clone()
    by_row[slots.long()] = weights.flatten()  # row r has the weight r, whatever its slot
    yield changed("weights dropped", weights=torch.ones_like(weights))
    yield changed("weights applied twice", weights=weights * weights)
    for dtype in (torch.bfloat16, torch.float16):
        yield changed(f"weights read as {dtype_name(dtype)}", weights=weights.to(dtype).to(weights.dtype))
    yield changed("weights in the order of rows, not of slots", weights=by_row.view_as(weights))
    yield changed("rows added in their own order, whatever their slots", slots=torch.arange(len(slots), device=slots.device))
    yield changed("weights of the next slot", weights=weights.flatten().roll(-1).view_as(weights))
    if weights.shape[1] > 1:
        for text, kept in (("only the first row of each token", 0), ("only the last row of each token", weights.shape[1] - 1)):
            alone = torch.zeros_like(weights)
            alone[:, kept] = weights[:, kept]
            yield changed(f"{text} counts", weights=alone)


def _of_terms(problem: Problem, operands: Operands, pieces: Pieces) -> Iterator[Change]:
    k = problem.k
    for size in sorted({*TAILS, *(k % tile for tile in TILES)} - {0}):
        if problem.divides_terms:
            shorter = [(begin, max(begin, end - size)) for begin, end in pieces]
            yield Change(text=f"last {size} terms of groups dropped", operands=operands, pieces=shorter)
        elif size < k:
            for end, dropped in (("last", slice(k - size, k)), ("first", slice(size))):
                a = operands.a.clone()
                _bits(a)[:, dropped] = 0
                yield _with(operands, pieces, f"{end} K block of {size} dropped", a=a)
    for tile in TILES if problem.divides_terms else ():
        whole = [(begin, begin + (end - begin) // tile * tile) for begin, end in pieces]
        yield Change(text=f"terms of groups past a multiple of {tile} dropped", operands=operands, pieces=whole)


def _of_numbers(operands: Operands, pieces: Pieces) -> Iterator[Change]:
    """Yield operands that are read with fewer bits."""
    for name in ("a", "b"):
        x: Tensor = getattr(operands, name)
        if x.element_size() == 1:
            continue
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
            narrow = x.to(dtype).to(x.dtype)
            yield _with(operands, pieces, f"{name} read as {dtype_name(dtype)}", **{name: narrow})
        if x.dtype == torch.float32:
            cut = (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)
            yield _with(operands, pieces, f"{name} read as tf32", **{name: cut})


def _at(x: Tensor, order: Tensor) -> Tensor:
    """Return matrices of x in another order. torch cannot index 8-bit floats on every device."""
    return _bits(x)[order].view(x.dtype)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x
