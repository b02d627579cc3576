"""Mutants that are right, but whose bits depend on the batch or are not those of the GEMM that they name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .gemm import DENSE, Gemm, Terms, apply_epilogue
from .products import one_by_one

__all__ = [
    "epilogue_rounded_for_few_rows",
    "halves_for_one_run",
    "lanes_for_one_row",
    "order_of_another_tile",
    "promoted_by_the_tile",
    "same_run_in_tiles",
    "split_for_few_rows",
    "stream_k",
]

FEW_ROWS, TILE_ROWS = 16, 64
LANES = 8
_INVARIANT = DENSE.changed({"batch_invariant": True, "splits": 8})
_SAME = DENSE.changed({"batch_invariant": True, "splits": 2, "same_bits": "mutants.right:each_row_by_itself"})


def _sum_of(a: torch.Tensor, b: torch.Tensor, parts: Sequence[slice]) -> torch.Tensor:
    """Return the sum of the products over parts of K, in their order."""
    acc = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    for part in parts:
        acc = acc + one_by_one(a[..., part], b[..., part, :])
    return acc


def _parts(k: int, length: int) -> list[slice]:
    return [slice(begin, min(begin + length, k)) for begin in range(0, k, length)]


def _split_for_few_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product, splitting K if there are few tiles."""
    k = a.shape[-1]
    return _sum_of(a, b, _parts(k, max(k if a.shape[-2] > FEW_ROWS else -(-k // 2), 1)))


def _order_of_another_tile(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of three parts of K, whose order is another one above a tile."""
    parts = _parts(a.shape[-1], max(-(-a.shape[-1] // 3), 1))
    return _sum_of(a, b, parts if a.shape[-2] <= TILE_ROWS else parts[::-1])


def _stream_k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product, with K of each tile divided where a worker's share of all steps ends."""
    m, k = a.shape[-2:]
    tiles = max(-(-m // FEW_ROWS), 1)
    rows = []
    for tile in range(tiles):
        cut = (tile + 1) * k // (tiles + 1)
        part = a[..., tile * FEW_ROWS : (tile + 1) * FEW_ROWS, :]
        rows.append(_sum_of(part, b, [slice(0, cut), slice(cut, k)]))
    return torch.cat(rows, dim=-2)


def _promoted_by_the_tile(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product, promoted every 4 steps in a small tile and every 8 in a large one."""
    return _sum_of(a, b, _parts(a.shape[-1], 4 if a.shape[-2] <= TILE_ROWS // 2 else 8))


def _lanes_for_one_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product, with a running sum for each of LANES elements of K if a has one row."""
    lanes = [slice(lane, None, LANES) for lane in range(LANES)]
    return _sum_of(a, b, lanes if a.shape[-2] == 1 else [slice(None)])


def _rounded_for_few_rows(acc: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return the epilogue of a sum that was rounded for a kernel of its own, if there are few rows."""
    fused = acc.shape[-2] > FEW_ROWS
    return apply_epilogue(acc if fused else acc.to(torch.bfloat16).to(acc.dtype), terms)


def _in_tiles(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product in one run over K, tile by tile."""
    return torch.cat([one_by_one(a[..., i : i + FEW_ROWS, :], b) for i in range(0, max(a.shape[-2], 1), FEW_ROWS)], dim=-2)


def _halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _sum_of(a, b, _parts(a.shape[-1], max(-(-a.shape[-1] // 2), 1)))


split_for_few_rows = Gemm(gemm_traits=_INVARIANT, product=_split_for_few_rows)
order_of_another_tile = Gemm(gemm_traits=_INVARIANT, product=_order_of_another_tile)
stream_k = Gemm(gemm_traits=_INVARIANT, product=_stream_k)
promoted_by_the_tile = Gemm(gemm_traits=_INVARIANT, product=_promoted_by_the_tile)
lanes_for_one_row = Gemm(gemm_traits=_INVARIANT, product=_lanes_for_one_row)
epilogue_rounded_for_few_rows = Gemm(gemm_traits=_INVARIANT, product=one_by_one, epilogue=_rounded_for_few_rows)
halves_for_one_run = Gemm(gemm_traits=_SAME, product=_halves)
"""It is batch-invariant. Its bits are not those of the other GEMM, which sums K in one run."""
same_run_in_tiles = Gemm(gemm_traits=_SAME, product=_in_tiles)
"""Right: tiles do not show in the bits."""
