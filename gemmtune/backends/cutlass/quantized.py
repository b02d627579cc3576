"""Quantized problems that CUTLASS serves, and their operations.

Scales multiply sums. int8 operations come from the generator, with any result type. All others are ours. Tensor cores read 8-bit
operands K-major: the first row-major, the second column-major. A b narrower than a is converted in registers, and tensor cores read
only their first operand from registers. So these operations compute the transpose, with b first.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.dtypes import dtype_name
from ...toolchain.orientation import why_not_scaled_sums
from .operation import ELEMENTS, Operation
from .tiles import TILES, tiled
from .toolkit import Toolkit, operations

ALIGNED_BYTES = 16
"""Alignment that TMA requires of addresses and rows."""
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in ELEMENTS.items() if name != "tf32"}
MOST_ROWS_CONVERTED = 128
"""Maximum tile rows of a warp group whose first operand goes through registers."""
ONE_BYTE_FLOATS = 90
"""Compute capability whose operations here multiply 8-bit floats, and convert a narrow b in registers."""


def why_not_quantized(problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why no operation can serve a quantized problem, or None. Dense problems get None."""
    if (problem.float8 or problem.widens_b) and device.capability != ONE_BYTE_FLOATS:
        return f"{problem.op} is served only on sm{ONE_BYTE_FLOATS}, not on {device.arch}"
    if problem.widens_b and problem.dtype not in (torch.float16, torch.bfloat16):
        return f"a is {dtype_name(problem.dtype)}, expected float16 or bfloat16 with a narrower b"
    if problem.encoding:
        return f"b has {problem.encoding} numbers, two in a byte, expected 8 bits for each"
    if problem.zero_b is not None:
        return "b has zero points, expected none: a scale multiplies sums"
    return why_not_scaled_sums(problem)


def quantized_operations(problem: Problem, toolkit: Toolkit, capability: int) -> tuple[Operation, ...]:
    """Return the operations with the problem's elements that run on ``capability``."""
    if problem.integers:
        return tuple(_int8(operations(toolkit, capability, "s8"), _NAMES[problem.out.dtype]))
    if problem.widens_b:
        converting = [tile for tile in TILES if tile.rows // (1 if tile.kind == "pingpong" else 2) <= MOST_ROWS_CONVERTED]
        return tuple(tiled(model_of(problem.b, problem.a, problem.out), converting))
    # Sums of 8-bit floats must leave the tensor cores after 128 elements, unless they are fast: one line (128 bytes) then.
    tiles = TILES if problem.fast_accum else dict.fromkeys(dataclasses.replace(tile, lines=1) for tile in TILES)
    pairs = ((problem.b, problem.a), (problem.a, problem.b))
    models = dict.fromkeys(model_of(a, b, problem.out) for a, b in pairs)
    return tuple(op for model in models for op in tiled(model, tiles, fast_accum=problem.fast_accum))


def _int8(listed: Iterable[Operation], d: str) -> Iterator[Operation]:
    """Yield the ``listed`` operations that store int32 sums, changed to store ``d`` (16 bytes at most at once) and renamed."""
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
