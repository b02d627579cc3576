"""Gradients of products with a block-sparse weight, through the same operations: of x, of the blocks, and of what is added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from ..dispatch.freshness import Stamp
from ..numerics.block_sparse import assembled, parts, rows_of
from ..problem.dtypes import accumulator_dtype
from ..problem.gradients import epilogue_gradients
from ..problem.sparsity import Sparsity, imbalance_of
from .sampled import sampled_blocks
from .weights import changing_indices, declare, sparsity_of

Tensor = torch.Tensor
Product = Callable[[Tensor, Tensor], Tensor]
"""It gives bsr @ x, without a gradient."""


@dataclass(frozen=True, slots=True)
class _Transpose:
    """The pattern of the transpose of a weight whose indices have this stamp: the order of its blocks, its indices, its class."""

    stamp: Stamp
    order: Tensor
    crow: Tensor
    col: Tensor
    sparsity: Sparsity


_transposes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def transposed(bsr: Tensor) -> Tensor:
    """Return the sparse_bsr tensor of the transpose. Its pattern is computed once, until the indices change."""
    known: _Transpose | None = _transposes.get(bsr)  # type: ignore[no-untyped-call]
    indices = changing_indices(bsr)
    if known is None or not known.stamp.holds(indices):
        known = _transposes[bsr] = _pattern(bsr, Stamp.of(indices))
    made = assembled(known.crow, known.col, bsr.values().detach()[known.order].mT.contiguous(), (bsr.shape[1], bsr.shape[0]))
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
    """The blocks of g [M, N] @ xᵀ [N, K] that exist in ``bsr`` [M, K], in its order: [blocks, block rows, block columns]."""
    values, crow, col = parts(bsr)
    return sampled_blocks(crow, col, g, x, (values.shape[1], values.shape[2]))


class BlockProduct(torch.autograd.Function):
    """alpha · bsr @ x + beta · inp, and an epilogue of it and of ``extra``: ``forward`` computes the whole.

    The backward pass computes the result before the epilogue again with ``before(bsr, x, inp)``, and products with ``again``.
    The gradient of a weight that was made of values goes to these, block by block. The gradient of a leaf, such as a Parameter, is
    a dense tensor with zeros where there is no block, because torch adds up no sparse_bsr tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        whole: Callable[[], Tensor],
        again: Product,
        before: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        numbers: tuple[float, ...],
        epilogue: Callable[..., Tensor] | None,
        bsr: Tensor,
        x: Tensor,
        inp: Tensor | None,
        *extra: Tensor,
    ) -> Tensor:
        ctx.again, ctx.before, ctx.numbers, ctx.is_leaf, ctx.epilogue = again, before, numbers, bsr.is_leaf, epilogue
        ctx.shape = None if inp is None else inp.shape
        ctx.save_for_backward(bsr, x, None if epilogue is None else inp, *extra)
        return whole()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (bsr, x, inp, *extra), (alpha, beta) = ctx.saved_tensors, ctx.numbers or (1, 1)
        wants_bsr, wants_x, wants_inp, *wants_extra = ctx.needs_input_grad[5:]
        of_extra: list[Tensor | None] = [None] * len(extra)
        if ctx.epilogue is not None:
            acc = ctx.before(bsr, x, inp).to(accumulator_dtype(x.dtype))
            g, of_extra = epilogue_gradients(ctx.epilogue, acc, extra, wants_extra, g)
            g = g.to(x.dtype)
        scaled = g if alpha == 1 else g * alpha
        grad_x = ctx.again(transposed(bsr), scaled) if wants_x else None
        grad_inp = (g * beta).sum_to_size(ctx.shape) if wants_inp else None
        grad_bsr = None
        if wants_bsr:
            bsr = bsr.detach()
            _, crow, col = parts(bsr)
            grad_bsr = assembled(crow, col, sampled_product(bsr, scaled, x), (bsr.shape[0], bsr.shape[1]))
            grad_bsr = grad_bsr.to_dense() if ctx.is_leaf else grad_bsr
        return None, None, None, None, None, grad_bsr, grad_x, grad_inp, *of_extra
