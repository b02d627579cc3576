"""Quantized problems that CUTLASS serves, and their operations.

A scale that is constant along K multiplies sums. Group scales, and scales that come with zero points, multiply weights during their
conversion. The main loop reads them through TMA, one line across K per step.

int8 operations come from the generator, with any result type. All others are ours. Tensor cores read 8-bit operands K-major: the
first row-major, the second column-major. A b narrower than a is converted in registers, and tensor cores read only their first
operand from registers. So these operations compute the transpose, with b first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.dtypes import dtype_name
from ...toolchain.orientation import block_scaled, scales_weights
from .operation import BLOCKWISE, ELEMENTS, ENCODED, FAST_ACCUM, BlockScales, Operation, WeightScales, bits_of, bytes_of
from .shuffle import atom_depth
from .tiles import SLICED, TILES, Tile, tiled
from .toolkit import Toolkit, operations

ALIGNED_BYTES = 16
"""Alignment that TMA requires of addresses and rows."""
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in ELEMENTS.items() if name != "tf32" and name not in ENCODED}
_NAMES_ENCODED = {encoding: name for name, encoding in ENCODED.items()}
INTEGERS = ("s4", "u4", "s8", "u8")
"""Elements that the shuffled main loop converts."""
MOST_ROWS_CONVERTED = 128
"""Maximum tile rows of a warp group whose first operand goes through registers."""
Name = Literal["scale_a", "scale_b", "zero_b"]
NAMES: tuple[Literal["scale_a", "scale_b"], ...] = ("scale_a", "scale_b")
LEAST_GROUP = 32
"""Minimum weights along K that share a scale: half a line, which is the least depth of a tile."""
ALIGNED_SCALES = 4
"""Float32 elements in 16 bytes, the alignment with which TMA can read a line of scales."""
ONE_BYTE_FLOATS = 90
"""Compute capability whose operations here multiply 8-bit floats, and convert a narrow b in registers."""


def why_not_quantized(problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why no operation can serve a quantized problem, or None. Dense problems get None."""
    if (problem.float8 or problem.widens_b) and device.capability != ONE_BYTE_FLOATS:
        return f"{problem.op} is served only on sm{ONE_BYTE_FLOATS}, not on {device.arch}"
    if problem.widens_b and problem.dtype not in (torch.float16, torch.bfloat16):
        return f"a is {dtype_name(problem.dtype)}, expected float16 or bfloat16 with a narrower b"
    if scales_weights(problem):
        return _why_not_weights(problem)
    if block_scaled(problem):
        return _why_not_blocks(problem)
    return next((reason for name in NAMES if (reason := _why_not_scale(problem, name)) is not None), None)


def why_not_grouped(operation: Operation, problem: Problem) -> str | None:
    """Return the reason why the main loop of ``operation`` cannot read the scales of weights, or None."""
    if operation.weights is None:
        return None
    group, depth = problem.scale_block("scale_b")[0], operation.tile[2]
    if group < problem.k and group % depth:
        return f"a step of its main loop has one scale for {depth} elements along K, but the problem has one for {group}"
    return None


def _why_not_weights(problem: Problem) -> str | None:
    if problem.zero_b is not None and not problem.prepacked:
        return "b has zero points but is not prepacked (gemmtune.prepack): CUTLASS would add zero points to scaled weights"
    if problem.zero_b is not None and problem.encoding and problem.scale_block("zero_b")[0] == LEAST_GROUP < problem.k:
        return f"zero_b is for groups of {LEAST_GROUP}, expected at least {atom_depth(4)} with prepacked 4-bit weights"
    if problem.zero_b is not None and problem.b.dtype.is_floating_point:
        return f"b is {dtype_name(problem.b.dtype)}, expected integers with zero points"
    names: tuple[Name, ...] = ("scale_b", "zero_b") if problem.zero_b is not None else ("scale_b",)
    for name in names:
        layout: Layout = getattr(problem, name)
        if problem.scale_block(name)[1] != 1:
            return f"{name} is one for all columns, expected one per column with zero points"
        if layout.dtype != problem.dtype:
            return f"{name} is {dtype_name(layout.dtype)}, expected a's {dtype_name(problem.dtype)}, in which weights are scaled"
        if not layout.row_major or layout.alignment * layout.dtype.itemsize < ALIGNED_BYTES:
            return f"{name} is {layout}, expected rows across K aligned to {ALIGNED_BYTES} bytes, which TMA reads"
    if problem.zero_b is not None and problem.scale_b is not None:
        scale, zero = problem.scale_b, problem.zero_b
        if (scale.size, scale.stride[0]) != (zero.size, zero.stride[0]):
            got, expected = (f"{list(x.size)} in lines of {x.stride[0]}" for x in (zero, scale))
            return f"zero_b is {got}, expected the layout of scale_b: {expected}"
    return None


def _why_not_blocks(problem: Problem) -> str | None:
    """Return the reason why the main loop cannot read the block scales, or None. They must be contiguous along K or across it."""
    for name, layout in zip(NAMES, problem.scales, strict=True):
        if not layout.row_major and not layout.column_major:
            return f"{name} is strided, expected contiguous rows or columns"
        across, extent = (layout.column_major, 0) if name == "scale_a" else (layout.row_major, 1)
        if across and problem.scale_block(name)[extent] == 1 and layout.alignment < ALIGNED_SCALES:
            return f"{name} has lines across K aligned to {layout.alignment} elements, expected {ALIGNED_SCALES}"
    return None


def _why_not_scale(problem: Problem, name: Literal["scale_a", "scale_b"]) -> str | None:
    """Return the reason why a scale cannot multiply sums, or None. It must not change along K."""
    if getattr(problem, name) is None:
        return None
    rows, cols = problem.scale_block(name)
    along_k, across, extent = (cols, rows, problem.m) if name == "scale_a" else (rows, cols, problem.n)
    if along_k >= problem.k and (across == 1 or across >= extent):
        return None
    line = "row" if name == "scale_a" else "column"
    return f"{name} is for {rows}x{cols} elements, expected one per whole {line} or one for all, which scales sums"


def quantized_operations(problem: Problem, toolkit: Toolkit, capability: int) -> tuple[Operation, ...]:
    """Return the operations with the problem's elements that run on ``capability``."""
    if problem.integers:
        return tuple(_int8(operations(toolkit, capability, "s8"), _NAMES[problem.out.dtype]))
    pairs = dict.fromkeys(((problem.b, problem.a), (problem.a, problem.b)))
    if problem.widens_b:
        return tuple(_mixed(problem))
    if block_scaled(problem):
        return tuple(_block_scaled(problem))
    tiles = TILES if problem.fast_accum else _one_line(TILES)
    models = dict.fromkeys(model_of(a, b, problem.out) for a, b in pairs)
    return tuple(op for model in models for op in tiled(model, tiles, FAST_ACCUM if problem.fast_accum else ""))


def _int8(listed: Iterable[Operation], d: str) -> Iterator[Operation]:
    """Yield the ``listed`` operations that store int32 sums, changed to store ``d``, and renamed by CUTLASS's scheme.

    A thread stores at most 16 bytes at once.
    """
    found: dict[str, Operation] = {}
    most = ALIGNED_BYTES // ELEMENTS[d].itemsize
    for op in sorted((op for op in listed if op.d == "s32"), key=lambda op: op.c != "void"):
        if op.modern:
            c, alignment = "void", most
            name = op.name.replace(f"_{op.accumulator}_{op.c}_{op.d}_", f"_{op.accumulator}_void_{d}_")
        else:
            c, alignment = d, min(op.alignment_d, most)
            name = op.name if d == op.d else op.name.replace("tensorop_i", f"tensorop_{d}_i")
        found.setdefault(name, dataclasses.replace(op, name=name, c=c, d=d, alignment_d=alignment))
    yield from found.values()


def _one_line(tiles: Iterable[Tile]) -> Iterable[Tile]:
    """Return tiles one line (128 bytes) deep. After 128 elements, narrow sums of 8-bit floats must leave the tensor cores."""
    return dict.fromkeys(dataclasses.replace(tile, lines=1) for tile in tiles)


def _mixed(problem: Problem) -> Iterator[Operation]:
    """Yield operations for b in its original layout and, if it may be prepacked, for shuffled b."""
    model = model_of(problem.b, problem.a, problem.out)
    if problem.encoding:
        name = _NAMES_ENCODED[problem.encoding]
        model = dataclasses.replace(model, a=name, alignment_a=8 * ALIGNED_BYTES // bits_of(name))
    if scales_weights(problem):
        weights = WeightScales(element=_NAMES[problem.dtype], zero=problem.zero_b is not None)
        model = dataclasses.replace(model, weights=weights)
    converting = [tile for tile in TILES if tile.rows // (1 if tile.kind == "pingpong" else 2) <= MOST_ROWS_CONVERTED]
    halved = model.weights is not None and problem.scale_block("scale_b")[0] == LEAST_GROUP
    if halved:
        converting = [*dict.fromkeys(tile.halved for tile in converting)]
    if model.weights is None or not model.weights.zero:  # CUTLASS adds zero points to scaled weights
        yield from tiled(model, converting)
    if problem.prepacked and model.a in INTEGERS:
        # The main loop needs two batches of multiplications per step, and whole atoms of the layout.
        of_line = converting if halved else (*SLICED, *converting)
        whole = [x for x in of_line if x.depth(bytes_of(model.multiplied, 1)) % atom_depth(bits_of(model.a)) == 0]
        yield from tiled(dataclasses.replace(model, shuffled=True), whole)


def _block_scaled(problem: Problem) -> Iterator[Operation]:
    """Yield the transposed product, b first, in tiles of whole blocks. CUTLASS does not divide these sums along K."""
    assert problem.scale_a is not None
    assert problem.scale_b is not None
    first = BlockScales(extent=problem.scale_block("scale_b")[1], along_k=not problem.scale_b.row_major)
    second = BlockScales(extent=problem.scale_block("scale_a")[0], along_k=problem.scale_a.row_major)
    model = dataclasses.replace(model_of(problem.b, problem.a, problem.out), scales_a=first, scales_b=second)
    whole = [tile for tile in _one_line(TILES) if tile.rows % first.extent == tile.cols % second.extent == 0]
    yield from tiled(model, [tile for tile in whole if tile.kind != "stream_k"], BLOCKWISE)


def model_of(a: Layout, b: Layout, out: Layout) -> Operation:
    """Return the common part of all operations with these elements. ``tiled`` fills in name, tile and schedule."""
    names = [_NAMES[x.dtype] for x in (a, b, out)]
    alignments = [ALIGNED_BYTES // x.dtype.itemsize for x in (a, b, out)]
    return Operation(
        name="", modern=True, introduced=90,
        a=names[0], b=names[1], c="void", d=names[2], accumulator="f32",
        layout_a="t", layout_b="n", layout_d="n",
        alignment_a=alignments[0], alignment_b=alignments[1], alignment_d=alignments[2],
        tile=(0, 0, 0), cluster=(1, 1, 1), stages=0, warps=(4, 1, 1), instruction=(0, 0, 0),
        opcode="TensorOp", math="multiply_add", kernel_schedule="", epilogue_schedule="", scheduler="",
    )  # fmt: skip
