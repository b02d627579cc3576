"""Parts of the gradients of block-sparse products: the transposed weight, and the gradient of the weight's blocks."""

from dataclasses import dataclass, replace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..dispatch.freshness import Stamp
from ..numerics.block_sparse import assembled, parts, rows_of
from ..problem.sparsity import Sparsity, imbalance_of
from .sampled import sampled_blocks
from .weights import changing_indices, declare, sparsity_of

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Transpose:
    """Pattern of a transposed weight: the order of its blocks, its indices, its class, and the stamp of the weight's indices."""

    stamp: Stamp
    order: Tensor
    crow: Tensor
    col: Tensor
    sparsity: Sparsity


_transposes: WeakIdKeyDictionary = WeakIdKeyDictionary()
_uses: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Numbers of products with a gradient, by the weight, which is no leaf."""


def count_use(bsr: Tensor) -> None:
    """Count a product of a weight. The gradients of several are dense, because torch cannot add sparse_bsr tensors."""
    if bsr.requires_grad and not bsr.is_leaf and torch.is_grad_enabled():
        _uses[bsr] = _uses.get(bsr, 0) + 1  # type: ignore[no-untyped-call]


def transposed(bsr: Tensor) -> Tensor:
    """Return the transpose, differentiable if a gradient is wanted. Its pattern is kept until the indices change."""
    known: _Transpose | None = _transposes.get(bsr)  # type: ignore[no-untyped-call]
    indices = changing_indices(bsr)
    if known is None or not known.stamp.holds(indices):
        known = _transposes[bsr] = _pattern(bsr, Stamp.of(indices))
    values = bsr.values()[known.order].mT.contiguous()
    made = assembled(known.crow, known.col, values, (bsr.shape[1], bsr.shape[0]))
    declare(made, known.sparsity)
    return made


def _pattern(bsr: Tensor, stamp: Stamp) -> _Transpose:
    values, crow, col = parts(bsr)
    columns, own = bsr.shape[1] // values.shape[2], sparsity_of("transpose", bsr)
    order = torch.argsort(col, stable=True)
    counts = torch.bincount(col, minlength=columns)
    longest = int(counts.max()) if columns else 0
    sparsity = replace(own, block_n=own.block_k, block_k=own.block_n, imbalance=imbalance_of(longest, len(col), columns))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(crow.dtype)
    return _Transpose(stamp, order, starts, rows_of(crow)[order].to(col.dtype), sparsity)


def sampled_product(bsr: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Return the blocks of g [M, N] @ xᵀ [N, K] that exist in bsr [M, K], in its order: [blocks, block rows, block columns]."""
    values, crow, col = parts(bsr)
    return sampled_blocks(crow, col, g, x, (values.shape[1], values.shape[2]))


def weight_gradient(bsr: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of bsr [M, K] for that of its product, g [M, N], and x [K, N].

    It is a sparse_bsr tensor with the weight's blocks, which autograd passes on to the values that the weight was made of. A leaf,
    such as a Parameter, and a weight of several products have a dense gradient with zeros outside of the blocks, because torch
    cannot add sparse_bsr tensors.
    """
    _, crow, col = parts(bsr.detach())
    found = assembled(crow, col, sampled_product(bsr.detach(), g, x), (bsr.shape[0], bsr.shape[1]))
    return found.to_dense() if bsr.is_leaf or _uses.get(bsr, 0) > 1 else found  # type: ignore[no-untyped-call]
