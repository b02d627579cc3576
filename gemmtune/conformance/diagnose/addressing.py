"""Bugs of addresses: ignored strides, offsets and batches, transposed operands, an unmasked end of a dimension."""

import math
from collections.abc import Iterator

import torch

from .epilogue import added_name
from .evidence import Matrix, Reading, View
from .match import Suspect

TILES = (8, 16, 32, 64, 128)
ALIGNED_BYTES = 16
"""Bytes of the widest load of one thread."""


def transposed(view: View) -> Iterator[Suspect]:
    """Yield suspects that exchange rows and columns of a, b, both, or the result, if these are square.

    For an operand that is not row-major this amounts to ignoring its strides. See ``misread``.
    """
    problem = view.problem

    def read_transposed(which: Matrix) -> torch.Tensor:
        batch, row, col = view.strides(which)
        return view.read(which, stride=(batch, col, row))

    a_t = read_transposed("a") if problem.m == problem.k and problem.a.row_major else None
    b_t = read_transposed("b") if problem.k == problem.n and problem.b.row_major else None
    if a_t is not None:
        yield Suspect("a transposed", view.of(a=a_t))
    if b_t is not None:
        yield Suspect("b transposed", view.of(b=b_t))
    if a_t is not None and b_t is not None:
        yield Suspect("a and b transposed", view.of(a_t, b_t))
        other = view.read("b", rows=view.rows, cols=view.inner) @ view.read("a", rows=view.inner, cols=view.cols)
        yield Suspect("b @ a in place of a @ b", view.result(other * view.scales))
    if problem.m == problem.n:
        rows = view.read("a", rows=view.cols), view.read("b", cols=view.rows)
        yield Suspect("result transposed", view.result((rows[0] @ rows[1]).mT * view.scales))


def misread(view: View) -> Iterator[Suspect]:
    """Yield suspects that read an operand, then both a and b, with other strides or another offset."""
    readings: dict[Matrix, dict[str, torch.Tensor]] = {}
    for which in _read_operands(view):
        readings[which] = {text: view.read(which, stride=stride, offset=offset) for text, stride, offset in _ways(view, which)}
        name = added_name(view) if which == "inp" else which
        for text, values in readings[which].items():
            yield Suspect(text.format(name), _replaced(view, which, values))
    for text, values in readings["a"].items():
        if text in readings["b"]:
            yield Suspect(text.format("a and b"), view.of(values, readings["b"][text]))


def _read_operands(view: View) -> tuple[Matrix, ...]:
    return ("a", "b", "inp") if view.inp is not None else ("a", "b")


def _replaced(view: View, which: Matrix, values: torch.Tensor) -> torch.Tensor:
    if which == "inp":
        return view.result(inp=values)
    return view.of(a=values) if which == "a" else view.of(b=values)


def _ways(view: View, which: Matrix) -> Iterator[tuple[str, tuple[int, int, int], int]]:
    """Yield (text with a gap for the operand's name, stride, storage offset) for each wrong way to read an operand."""
    matrix = view.matrix(which)
    batch, rows, cols = matrix.shape
    (by_batch, by_row, by_col), start = view.strides(which), int(matrix.storage_offset())
    layout = {"a": view.problem.a, "b": view.problem.b, "inp": view.problem.inp}[which]
    offset = layout.offset if layout is not None else 0
    inner = by_batch if batch == 1 else rows * cols
    ways = [
        ("{} read without the gap between its rows", (by_batch, cols * by_col, by_col), start),
        ("{} read without the gap between its columns", (by_batch, by_row, rows * by_row), start),
        ("batch stride of {} ignored, matrices read as neighbours", (rows * cols, by_row, by_col), start),
        ("{} read as contiguous, strides ignored", (inner, cols, 1), start),
        ("{} read as column-major without gaps", (inner, 1, rows), start),
        ("{} read with neighbouring elements in each row", (by_batch, by_row, 1), start),
        ("storage offset of {} ignored", (by_batch, by_row, by_col), start - offset),
        ("storage offset of {} ignored, read from the start of its buffer", (by_batch, by_row, by_col), 0),
    ]
    unit = ALIGNED_BYTES // matrix.element_size()
    for words, more in (("down", 0), ("up", unit - 1)):
        row, col = ((x + more) // unit * unit if x >= unit else x for x in (by_row, by_col))
        ways.append((f"{{}} read with a leading dimension rounded {words} to {ALIGNED_BYTES} bytes", (by_batch, row, col), start))
    for text, stride, begin in ways:
        if begin != start or any(x != y and n > 1 for x, y, n in zip(stride, matrix.stride(), matrix.shape, strict=True)):
            yield text, stride, begin


def miswritten(view: View) -> Iterator[Suspect]:
    """Yield the suspect that writes the result as if out were contiguous, and is then read through out's strides."""
    out = view.problem.out
    steps = out.stride if len(out.stride) == 3 else (0, *out.stride)
    (batch, m, n), right = view.evidence.expected.shape, view.evidence.expected.flatten()
    place = view.batches[:, None, None] * steps[0] + view.rows[:, None] * steps[1] + view.cols * steps[2]
    written = right.cpu()[place.clamp(0, batch * m * n - 1)]
    yield Suspect("out written as contiguous, strides ignored", torch.where(place < batch * m * n, written, math.nan))


def batches(view: View) -> Iterator[Suspect]:
    """Yield suspects that use the first matrix of a batch for all."""
    if view.problem.batch == 1:
        return
    firsts: dict[Matrix, torch.Tensor] = {
        which: view.read(which, stride=(0, *view.strides(which)[1:])) for which in _read_operands(view)
    }
    for which, values in firsts.items():
        name = added_name(view) if which == "inp" else which
        yield Suspect(f"first matrix of {name} used for every batch", _replaced(view, which, values))
    product = firsts["a"] @ firsts["b"] * view.scales
    yield Suspect("first batch computed for every batch", view.result(product))
    if "inp" in firsts:
        yield Suspect("first batch computed for every batch", view.result(product, inp=firsts["inp"]))


def clamped(view: View) -> Iterator[Suspect]:
    """Yield suspects that read the line before the last in place of the last one, as an off-by-one bound does."""
    problem = view.problem
    dimensions = ((view.rows, problem.m), (view.cols, problem.n), (view.inner, problem.k))
    rows, cols, inner = (x.clamp_max(max(size - 2, 0)) for x, size in dimensions)
    by_row = view.read("a", rows=rows) @ view.b * view.scales
    by_col = view.a @ view.read("b", cols=cols) * view.scales
    if view.inp is not None:
        yield Suspect("last row repeats the one before it", view.result(by_row, inp=view.read("inp", rows=rows)))
        yield Suspect("last column repeats the one before it", view.result(by_col, inp=view.read("inp", cols=cols)))
    before = "last {0} of a @ b repeats the one before it" if view.inp is not None else "last {0} repeats the one before it"
    yield Suspect(before.format("row"), view.result(by_row))
    yield Suspect(before.format("column"), view.result(by_col))
    if problem.k > 1:
        last = view.read("a", cols=inner) @ view.read("b", rows=inner) * view.scales
        yield Suspect("last element of K replaced by the one before it", view.result(last), along_k=True)
        yield Suspect("last column of a replaced by the one before it", view.of(a=view.read("a", cols=inner)), along_k=True)
        yield Suspect("last row of b replaced by the one before it", view.of(b=view.read("b", rows=inner)), along_k=True)


def repeated(view: View) -> Iterator[Suspect]:
    """Yield suspects that compute one row, column or tile for all, as a program without its index does."""
    problem = view.problem
    for size in (1, *TILES):
        for name, count, lines in (("row", problem.m, view.rows), ("column", problem.n, view.cols)):
            if size >= count:
                continue
            text = f"every {name} repeats the first" if size == 1 else f"the first {size} {name}s repeat"
            at = Reading(rows=lines % size) if name == "row" else Reading(cols=lines % size)
            product = (view.read("a", **at) @ view.b if name == "row" else view.a @ view.read("b", **at)) * view.scales
            yield Suspect(text, view.result(product), len(TILES))
            if view.inp is not None:
                yield Suspect(text, view.result(product, inp=view.read("inp", **at)), len(TILES))


def unmasked(view: View) -> Iterator[Suspect]:
    """Yield suspects that do not mask K: the memory past its end takes part, up to the next multiple of a tile."""
    k = view.problem.k
    for tile in TILES:
        padded = -(-k // tile) * tile
        if padded > k:
            inner = torch.arange(padded)
            product = view.read("a", cols=inner) @ view.read("b", rows=inner) * view.scales
            yield Suspect(f"what lies past the end of K is read, to the next multiple of {tile}", view.result(product), len(TILES))
