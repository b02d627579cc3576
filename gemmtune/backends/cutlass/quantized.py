"""Quantized problems: which of them CUTLASS's kernels serve, and by which operations.

A scale that does not change along K multiplies sums. Scales of groups multiply weights where these are converted, and so do scales
that come with zero points: the main loop reads them through TMA, one line across K for each of its steps.

Operations are the generator's for int8, with results of any type, and ours for all the others. Tensor cores read 8-bit operands
K-major: the first row-major, the second column-major. Where b is narrower than a, it is converted in registers, from which tensor
cores read their first operand alone: these operations compute the transpose, with b first.
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
"""What TMA asks of addresses and rows."""
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in ELEMENTS.items() if name != "tf32" and name not in ENCODED}
_NAMES_ENCODED = {encoding: name for name, encoding in ENCODED.items()}
INTEGERS = ("s4", "u4", "s8", "u8")
"""What the shuffled main loop converts."""
MOST_ROWS_CONVERTED = 128
"""The most rows of a warp group's tile whose first operand goes through registers."""
Name = Literal["scale_a", "scale_b", "zero_b"]
NAMES: tuple[Literal["scale_a", "scale_b"], ...] = ("scale_a", "scale_b")
LEAST_GROUP = 32
"""Weights along K that share a scale: as many as half a line has, the least depth of a tile."""
ALIGNED_SCALES = 4
"""Elements of 16 bytes: TMA may read a line of scales."""
ONE_BYTE_FLOATS = 90
"""The compute capability whose operations multiply 8-bit floats here, and convert b on its way to the tensor cores."""


def why_not_quantized(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no operation can serve a quantized problem; None where one may, and for every dense problem."""
    if (problem.float8 or problem.widens_b) and device.capability != ONE_BYTE_FLOATS:
        return f"{problem.op} is served on sm{ONE_BYTE_FLOATS} alone, not on {device.arch}"
    if problem.widens_b and problem.dtype not in (torch.float16, torch.bfloat16):
        return f"a is {dtype_name(problem.dtype)}, expected float16 or bfloat16 beside a narrower b"
    if scales_weights(problem):
        return _why_not_weights(problem)
    if block_scaled(problem):
        return _why_not_blocks(problem)
    return next((reason for name in NAMES if (reason := _why_not_scale(problem, name)) is not None), None)


def why_not_grouped(operation: Operation, problem: Problem) -> str | None:
    """Why the main loop of ``operation`` cannot read the scales of weights."""
    if operation.weights is None:
        return None
    group, depth = problem.scale_block("scale_b")[0], operation.tile[2]
    if group < problem.k and group % depth:
        return f"a step of its main loop, {depth} elements along K, has one scale; those of the problem are for {group}"
    return None


def _why_not_weights(problem: Problem) -> str | None:
    if problem.zero_b is not None and not problem.prepacked:
        return "zero points are subtracted from prepacked weights alone (gemmtune.prepack): CUTLASS adds them to scaled ones"
    if problem.zero_b is not None and problem.encoding and problem.scale_block("zero_b")[0] == LEAST_GROUP < problem.k:
        return f"zero_b is for groups of {LEAST_GROUP}; prepacked weights of 4 bits are read {atom_depth(4)} at a time"
    if problem.zero_b is not None and problem.b.dtype.is_floating_point:
        return f"b is {dtype_name(problem.b.dtype)}, expected integers beside zero points"
    names: tuple[Name, ...] = ("scale_b", "zero_b") if problem.zero_b is not None else ("scale_b",)
    for name in names:
        layout: Layout = getattr(problem, name)
        if problem.scale_block(name)[1] != 1:
            return f"{name} is one for all columns, expected one for each beside zero points"
        if layout.dtype != problem.dtype:
            return f"{name} is {dtype_name(layout.dtype)}, expected a's {dtype_name(problem.dtype)}, in which weights are scaled"
        if not layout.row_major or layout.alignment * layout.dtype.itemsize < ALIGNED_BYTES:
            return f"{name} has no lines across K of whole {ALIGNED_BYTES} bytes, which TMA reads"
    if problem.zero_b is not None and problem.scale_b is not None:
        scale, zero = problem.scale_b, problem.zero_b
        if (scale.size, scale.stride[0]) != (zero.size, zero.stride[0]):
            got, expected = (f"{list(x.size)} in lines of {x.stride[0]}" for x in (zero, scale))
            return f"zero_b is {got}, expected what scale_b is: {expected}"
    return None


def _why_not_blocks(problem: Problem) -> str | None:
    """The main loop reads scales of blocks as neighbours in memory along K or across it."""
    for name, layout in zip(NAMES, problem.scales, strict=True):
        if not layout.row_major and not layout.column_major:
            return f"{name} is strided, expected rows or columns of neighbours in memory"
        across, extent = (layout.column_major, 0) if name == "scale_a" else (layout.row_major, 1)
        if across and problem.scale_block(name)[extent] == 1 and layout.alignment < ALIGNED_SCALES:
            return f"{name} has lines across K aligned to {layout.alignment} elements, expected {ALIGNED_SCALES}"
    return None


def _why_not_scale(problem: Problem, name: Literal["scale_a", "scale_b"]) -> str | None:
    """A sum has one scale of each operand if that does not change along K."""
    if getattr(problem, name) is None:
        return None
    rows, cols = problem.scale_block(name)
    along_k, across, extent = (cols, rows, problem.m) if name == "scale_a" else (rows, cols, problem.n)
    if along_k >= problem.k and (across == 1 or across >= extent):
        return None
    line = "row" if name == "scale_a" else "column"
    return f"{name} is for {rows}x{cols} elements; expected one for each whole {line}, or for all, which scales sums"


def quantized_operations(problem: Problem, toolkit: Toolkit, capability: int) -> tuple[Operation, ...]:
    """Operations with the elements of the problem that run on ``capability``."""
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
    """Those of ``listed`` that store their int32 sums, storing ``d`` instead, named by CUTLASS's scheme.

    A thread stores 16 bytes at once at most.
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
    """Elements that stay as narrow sums of 8-bit floats in the tensor cores before they are added to others or scaled: 128."""
    return dict.fromkeys(dataclasses.replace(tile, lines=1) for tile in tiles)


def _mixed(problem: Problem) -> Iterator[Operation]:
    """b as it is, and where it may be prepacked, shuffled."""
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
        # The main loop has two batches of multiplications in a step, and whole atoms of the layout.
        of_line = converting if halved else (*SLICED, *converting)
        whole = [x for x in of_line if x.depth(bytes_of(model.multiplied, 1)) % atom_depth(bits_of(model.a)) == 0]
        yield from tiled(dataclasses.replace(model, shuffled=True), whole)


def _block_scaled(problem: Problem) -> Iterator[Operation]:
    """The transpose, b first, in tiles of whole blocks. CUTLASS does not divide these sums along K."""
    assert problem.scale_a is not None
    assert problem.scale_b is not None
    first = BlockScales(extent=problem.scale_block("scale_b")[1], along_k=not problem.scale_b.row_major)
    second = BlockScales(extent=problem.scale_block("scale_a")[0], along_k=problem.scale_a.row_major)
    model = dataclasses.replace(model_of(problem.b, problem.a, problem.out), scales_a=first, scales_b=second)
    whole = [tile for tile in _one_line(TILES) if tile.rows % first.extent == tile.cols % second.extent == 0]
    yield from tiled(model, [tile for tile in whole if tile.kind != "stream_k"], BLOCKWISE)


def model_of(a: Layout, b: Layout, out: Layout) -> Operation:
    """What all operations of these elements have in common; ``tiled`` replaces name, tile and schedule."""
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
