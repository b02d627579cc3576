"""scaled_mm of cuBLASLt, called directly or by torch's ``_scaled_mm``: pairs of scale kinds and their memory layout."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..problem import Problem
from ..problem.scales import SCALE_BLOCK

Tensor = torch.Tensor
Block = tuple[int | None, int | None]
KB_MULTIPLE = 4
"""Multiple of scales along K that cuBLASLt expects of square blocks (cuBLAS documentation, on their layouts)."""


def _one(scale: Tensor, grow: int) -> Tensor:  # noqa: ARG001 - one number for any size
    return scale


def _rows(scale: Tensor, grow: int) -> Tensor:
    """Return [M, 1], contiguous, with ``grow`` more rows. torch expects a stride of 1 along the only column."""
    return pad(scale, (0, 0, 0, grow)) if grow else scale.contiguous().view(-1).unsqueeze(1)  # for torch any stride is contiguous


def _packed(scale: Tensor, grow: int) -> Tensor:
    """Return [1, N] or [K/128, N] with contiguous rows and ``grow`` more columns."""
    return pad(scale, (0, grow)) if grow else scale.contiguous()


def _packed_columns(scale: Tensor, grow: int) -> Tensor:
    """Return [M, K/128] with contiguous columns and ``grow`` more rows."""
    return _packed(scale.t(), grow).t()


def _long_b(scale: Tensor, grow: int) -> Tensor:
    """Return [K/128, N] as [N, K/128] with contiguous columns and ``grow`` more columns of N."""
    return _packed(scale, grow).t()


def _square_a(scale: Tensor, grow: int) -> Tensor:  # noqa: ARG001 - the added rows begin no new block
    """Return [M/128, K/128] as [K/128, M/128] with contiguous columns and K/128 padded to a multiple of 4."""
    return _packed(scale, -scale.shape[1] % KB_MULTIPLE).t()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Pair of scale kinds.

    ``a`` and ``b`` are the blocks (rows, columns) that share a scale, with None for the whole dimension. ``recipes`` are
    values of ``torch.nn.functional.ScalingType``. ``place_a(scale, rows)`` and ``place_b(scale, columns)`` lay scales out for
    operands that were padded by that many rows or columns.
    """

    a: Block
    b: Block
    recipes: tuple[int, int]
    place_a: Callable[[Tensor, int], Tensor]
    place_b: Callable[[Tensor, int], Tensor]

    @property
    def blocks(self) -> bool:
        """True if there are several scales along K."""
        return self.a[1] is not None


_ALL: Block = (None, None)
_SQUARE: Block = (SCALE_BLOCK, SCALE_BLOCK)
_LONG_A: Block = (1, SCALE_BLOCK)
_LONG_B: Block = (SCALE_BLOCK, 1)
MODES: dict[str, Mode] = {
    "tensor": Mode(a=_ALL, b=_ALL, recipes=(0, 0), place_a=_one, place_b=_one),
    "row": Mode(a=(1, None), b=(None, 1), recipes=(1, 1), place_a=_rows, place_b=_packed),
    "1x128_128x128": Mode(
        a=_LONG_A, b=_SQUARE, recipes=(4, 5), place_a=_packed_columns, place_b=lambda scale, grow: _square_a(scale.t(), grow)
    ),
    "128x128_128x1": Mode(a=_SQUARE, b=_LONG_B, recipes=(5, 4), place_a=_square_a, place_b=_long_b),
    "1x128_128x1": Mode(a=_LONG_A, b=_LONG_B, recipes=(4, 4), place_a=_packed_columns, place_b=_long_b),
}
"""Modes, the coarsest first. Coarser scales than those of a mode are repeated to match it."""


def mode_of(problem: Problem) -> str:
    """Return the name of the coarsest mode that represents the problem's scales."""
    block_a, block_b = problem.scale_block("scale_a"), problem.scale_block("scale_b")
    for name, mode in MODES.items():
        if _finer(mode.a, block_a, (problem.m, problem.k)) and _finer(mode.b, block_b, problem.b_size):
            return name
    raise AssertionError(f"the last mode has all scales, but not those of {problem}")


def at_blocks(scale: Tensor, size: tuple[int, int], block: Block) -> Tensor:
    """Return a scale of an operand of ``size`` as a matrix with one number for each ``block``, which is as fine as the scale."""
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    for dim, side in enumerate(block):
        count = 1 if side is None else -(-size[dim] // side)
        if scale.shape[dim] == 1 and count > 1:
            scale = scale.expand(*(count if d == dim else n for d, n in enumerate(scale.shape)))
        elif scale.shape[dim] != count:
            scale = scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, count)
    return scale


def scale_placer(problem: Problem, rows: int = 0, cols: int = 0) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return place(scale_a, scale_b), which lays out, aligned and copied only if needed, the scales of operands padded so."""
    mode = MODES[mode_of(problem)]
    size_a, size_b = (problem.m, problem.k), problem.b_size
    moved_a, moved_b = (
        mode.a != _ALL and layout is not None and layout.offset != 0 for layout in (problem.scale_a, problem.scale_b)
    )

    def place(scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
        scale_a = at_blocks(scale_a.clone() if moved_a else scale_a, size_a, mode.a)
        scale_b = at_blocks(scale_b.clone() if moved_b else scale_b, size_b, mode.b)
        return mode.place_a(scale_a, rows), mode.place_b(scale_b, cols)

    return place


def _finer(block: Block, coarse: tuple[int, int], size: tuple[int, int]) -> bool:
    """Return True if scales for ``coarse`` blocks of an operand of ``size`` can be repeated to scales for each ``block``."""
    return all(
        whole >= extent if side is None else whole >= extent or whole % side == 0
        for side, whole, extent in zip(block, coarse, size, strict=True)
    )


def has_plain_bias(problem: Problem) -> bool:
    """Return True if the epilogue is ``acc + x`` with a contiguous row x of N elements of out's dtype, which libraries add."""
    epilogue, out = problem.epilogue, problem.out
    if epilogue is None or len(epilogue.operands) != 1:
        return False
    ops = [node.op for node in epilogue.nodes]
    x = epilogue.operands[0]
    row = x.size in ((problem.n,), (1, problem.n)) and (x.stride[-1] == 1 or problem.n == 1) and x.offset == 0
    wanted = epilogue.result_dtype in (None, out.dtype)
    narrow = out.dtype in (torch.bfloat16, torch.float16) and x.dtype == out.dtype
    two_terms = sorted(ops[:3]) == ["acc", "add", "operand"] and len(epilogue.nodes[2].args) == 2
    return two_terms and ops[3:] in ([], ["cast"]) and row and wanted and narrow
