"""Block-sparse operands: block patterns, the sparse tensor of a dense matrix, and the equivalent dense problem."""

import math
from collections.abc import Iterator

import torch

from ..problem import Layout, Problem
from ..problem.dtypes import is_float8
from ..problem.sparsity import Sparsity

SKEW = 1.5
"""Exponent of the power law by which the block rows of a skewed pattern get shorter, longest first."""
PARTS = 3
"""Number of dense tensors that hold a sparse_bsr tensor."""


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold the data: values and indices of a sparse_bsr tensor, else the tensor alone."""
    if tensor.layout != torch.sparse_bsr:
        return (tensor,)
    return tensor.values(), tensor.crow_indices(), tensor.col_indices()


def random_mask(
    size: tuple[int, int], sparsity: Sparsity, generator: torch.Generator, *, density: float | None = None
) -> torch.Tensor:
    """Return a random mask of the blocks that exist, bool [block rows, block columns].

    ``size`` is the weight's (N, K). ``density`` replaces the density of the sparsity class if it is given. The mask is
    drawn on the CPU, where row lengths are made, and is moved to the generator's device.
    """
    share = sparsity.density if density is None else density
    rows, cols = size[0] // sparsity.block_n, size[1] // sparsity.block_k
    wanted = torch.full((rows,), round(share * cols), device="cpu")
    drawing = generator
    if generator.device.type != "cpu":  # a generator of the CPU, seeded by the next number that this one draws
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        drawing = torch.Generator("cpu").manual_seed(int(seed))
    if sparsity.imbalance == "skewed" and rows:
        wanted = _power_law(rows, cols, share)[torch.randperm(rows, generator=drawing, device="cpu")]
    order = torch.rand((rows, cols), generator=drawing, device="cpu").argsort(dim=1)
    return (order < wanted.unsqueeze(1)).to(generator.device)


def _power_law(rows: int, cols: int, share: float) -> torch.Tensor:
    """Return each block row's number of blocks, int64: a power law up to full rows that adds up to ``share`` of all."""
    shape = torch.arange(1, rows + 1, dtype=torch.float64, device="cpu").pow(-SKEW)
    low, high = 0.0, cols * math.pow(rows, SKEW)
    for _ in range(60):
        middle = (low + high) / 2
        too_few = float((shape * middle).clamp(max=cols).sum()) < share * rows * cols
        low, high = (middle, high) if too_few else (low, middle)
    return (shape * high).round().clamp(max=cols).long()


def awkward_masks(size: tuple[int, int], sparsity: Sparsity, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield patterns on which block-sparse kernels go wrong: row ends, empty rows, one long row, no blocks."""
    rows, cols = size[0] // sparsity.block_n, size[1] // sparsity.block_k
    row, col = torch.arange(rows, device=device).unsqueeze(1), torch.arange(cols, device=device)
    yield "ends", ((col == cols - 1) & (row % 3 != 1)) | ((col == 0) & (row % 3 == 2))
    yield "one long row", (row == rows - 1) & (col >= 0)
    yield "diagonal", (col % max(rows, 1)) == row
    yield "nothing", torch.zeros((rows, cols), dtype=torch.bool, device=device)


def by_blocks(weight: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Return a matrix [N, K] as [block rows, block columns, block_n, block_k], as a view if possible."""
    n, k = weight.shape
    rows, cols = n // sparsity.block_n, k // sparsity.block_k
    return weight.reshape(rows, sparsity.block_n, cols, sparsity.block_k).transpose(1, 2)


def spread(mask: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Expand a mask of blocks into a mask of elements, [N, K]."""
    return mask.repeat_interleave(sparsity.block_n, 0).repeat_interleave(sparsity.block_k, 1)


def sparse_of(weight: torch.Tensor, mask: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Return the blocks of ``weight`` [N, K] selected by ``mask`` as a sparse_bsr tensor. Zeros inside a selected block stay."""
    index = torch.int64 if sparsity.wide_index else torch.int32
    row, col = mask.nonzero(as_tuple=True)
    counts = mask.sum(dim=1)
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(index)
    values = by_blocks(weight, sparsity)[row, col].contiguous()
    return assembled(crow, col.to(index), values, (weight.shape[0], weight.shape[1]))


def assembled(crow: torch.Tensor, col: torch.Tensor, values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Build a sparse_bsr tensor from parts that are known to fit together."""
    return torch.sparse_bsr_tensor(crow, col, values, size=size, device=values.device, check_invariants=False)


def copied(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a sparse_bsr tensor in separate memory."""
    values, crow, col = (x.clone() for x in parts(weight))
    return assembled(crow, col, values, (weight.shape[0], weight.shape[1]))


def mask_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the mask of existing blocks of a sparse_bsr tensor, bool [block rows, block columns]."""
    values, crow, col = parts(weight)
    rows, cols = weight.shape[0] // values.shape[1], weight.shape[1] // values.shape[2]
    mask = torch.zeros((rows, cols), dtype=torch.bool, device=values.device)
    mask[rows_of(crow), col.long()] = True
    return mask


def rows_of(crow: torch.Tensor) -> torch.Tensor:
    """Return the block row of each block, int64."""
    counts = crow.diff().long()
    return torch.arange(counts.numel(), device=crow.device).repeat_interleave(counts)


def densified(weight: torch.Tensor) -> torch.Tensor:
    """Return the dense matrix of a sparse_bsr tensor. torch cannot sum 8-bit floats, so these are moved as bytes."""
    if not is_float8(weight.dtype):
        return weight.to_dense()
    values, crow, col = parts(weight)
    whole = assembled(crow, col, values.view(torch.uint8), (weight.shape[0], weight.shape[1]))
    return whole.to_dense().view(weight.dtype)


def occupied(weight: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Return the mask of blocks of a dense matrix [N, K] that have a nonzero element."""
    return (by_blocks(weight, sparsity) != 0).flatten(2).any(dim=2)


def dense_problem(problem: Problem) -> Problem:
    """Return the problem of the dense product with the matrix that a block-sparse b represents. 8-bit floats get scales of one."""
    fields = {name: getattr(problem, name) for name in ("a", "b", "out", "inp", "alpha", "beta", "epilogue", "device_type")}
    op = "int_mm" if problem.integers else problem.op.removeprefix("bsr_")
    if is_float8(problem.dtype):
        op, one = "scaled_mm", Layout.contiguous((1,), torch.float32)
        fields |= {"scale_a": one, "scale_b": one}
    return Problem(op=op, precision=problem.precision, prepacked=problem.prepacked, **fields)


def panels_of(weight: torch.Tensor, panel_n: int, panel_k: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """Return the numbers of ``weight`` as a sparse_bsr tensor with blocks of ``panel_n`` × ``panel_k`` and 32-bit indices.

    A panel exists if it overlaps a block. Zeros make all panels whole. ``order`` permutes units of gcd(block_n, ``panel_n``) rows,
    empty ones included.
    """
    values, crow, col = parts(weight)
    count, block_n, block_k = values.shape
    n, k = (-(-size // side) * side for size, side in zip(weight.shape, (panel_n, panel_k), strict=True))
    if order is None and (block_n, block_k) == (panel_n, panel_k):
        return assembled(crow.to(torch.int32), col.to(torch.int32), values.contiguous(), (n, k))
    unit_n, unit_k = math.gcd(block_n, panel_n), math.gcd(block_k, panel_k)
    per_block, per_panel = (block_n // unit_n, block_k // unit_k), (panel_n // unit_n, panel_k // unit_k)
    device = values.device
    inner_n, inner_k = (torch.arange(size, device=device) for size in per_block)
    unit_row = (rows_of(crow).view(-1, 1, 1) * per_block[0] + inner_n.view(1, -1, 1)).expand(count, *per_block).reshape(-1)
    unit_col = (col.long().view(-1, 1, 1) * per_block[1] + inner_k.view(1, 1, -1)).expand(count, *per_block).reshape(-1)
    if order is not None:
        n = len(order) * unit_n
        unit_row = order.argsort()[unit_row]
    units = values.reshape(count, per_block[0], unit_n, per_block[1], unit_k).transpose(2, 3).reshape(-1, unit_n, unit_k)
    columns = k // panel_k
    places, which = (unit_row // per_panel[0] * columns + unit_col // per_panel[1]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    filled = units.new_zeros((len(places), *per_panel, unit_n, unit_k))
    filled[which, unit_row % per_panel[0], unit_col % per_panel[1]] = units
    joined = filled.transpose(2, 3).reshape(len(places), panel_n, panel_k)
    counts = torch.bincount(places // max(columns, 1), minlength=n // panel_n)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return assembled(starts.to(torch.int32), (places % max(columns, 1)).to(torch.int32), joined, (n, k))
