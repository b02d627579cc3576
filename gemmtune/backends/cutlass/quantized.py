"""The operations of quantized problems: the generator's for int8, with results of any type, and ours for all the others.

Tensor cores read 8-bit operands K-major: the first row-major, the second column-major. Where b is narrower than a, it is converted
in registers, from which tensor cores read their first operand alone: these operations compute the transpose, with b first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from ...problem import Layout, Problem
from ...toolchain.orientation import block_scaled, scales_weights
from .operation import BLOCKWISE, ELEMENTS, ENCODED, FAST_ACCUM, BlockScales, Operation, WeightScales, bits_of, bytes_of
from .shuffle import atom_depth
from .tiles import LINE_BYTES, SLICED, TILES, Tile, tiled
from .toolkit import Toolkit, operations

__all__ = ["quantized_operations"]

ALIGNED_BYTES = 16
"""What TMA asks of addresses and rows."""
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in ELEMENTS.items() if name != "tf32" and name not in ENCODED}
_NAMES_ENCODED = {encoding: name for name, encoding in ENCODED.items()}
INTEGERS = ("s4", "u4", "s8", "u8")
"""What the shuffled main loop converts."""
MOST_ROWS_CONVERTED = 128
"""Of a warp group's tile whose first operand goes through registers."""


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
    models = dict.fromkeys(_model(a, b, problem.out) for a, b in pairs)
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
    model = _model(problem.b, problem.a, problem.out)
    if problem.encoding:
        name = _NAMES_ENCODED[problem.encoding]
        model = dataclasses.replace(model, a=name, alignment_a=8 * ALIGNED_BYTES // bits_of(name))
    if scales_weights(problem):
        weights = WeightScales(element=_NAMES[problem.dtype], zero=problem.zero_b is not None)
        model = dataclasses.replace(model, weights=weights)
    converting = [tile for tile in TILES if tile.rows // (1 if tile.kind == "pingpong" else 2) <= MOST_ROWS_CONVERTED]
    if model.weights is None or not model.weights.zero:  # CUTLASS adds zero points to scaled weights
        yield from tiled(model, converting)
    if problem.prepacked and model.a in INTEGERS:
        # The main loop has two batches of multiplications in a step, and whole atoms of the layout.
        depths = {tile: tile.lines * LINE_BYTES // bytes_of(model.multiplied, 1) for tile in (*SLICED, *converting)}
        whole = [tile for tile, depth in depths.items() if depth % atom_depth(bits_of(model.a)) == 0]
        yield from tiled(dataclasses.replace(model, shuffled=True), whole)


def _block_scaled(problem: Problem) -> Iterator[Operation]:
    """The transpose, b first, in tiles of whole blocks. CUTLASS does not divide these sums along K."""
    assert problem.scale_a is not None
    assert problem.scale_b is not None
    first = BlockScales(extent=problem.scale_block("scale_b")[1], along_k=not problem.scale_b.row_major)
    second = BlockScales(extent=problem.scale_block("scale_a")[0], along_k=problem.scale_a.row_major)
    model = dataclasses.replace(_model(problem.b, problem.a, problem.out), scales_a=first, scales_b=second)
    whole = [tile for tile in _one_line(TILES) if tile.rows % first.extent == tile.cols % second.extent == 0]
    yield from tiled(model, [tile for tile in whole if tile.kind != "stream_k"], BLOCKWISE)


def _model(a: Layout, b: Layout, out: Layout) -> Operation:
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
