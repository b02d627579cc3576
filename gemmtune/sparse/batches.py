"""Batches of block-sparse products as one product. Matrices stand side by side. Weights are stacked, or stand along a diagonal."""

import math
from collections.abc import Callable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..dispatch.checks import check_extra, check_operands
from ..dispatch.freshness import Stamp
from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..numerics.block_sparse import assembled, parts

Tensor = torch.Tensor
Multiply = Callable[[Tensor | PackedOperand, Tensor, Tensor | None], Tensor]
"""Function that does the operation on bsr [M, K], x [K, N], and inp [M, N] or None."""
_stacked: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Stamps of batches, and the stacked weights made of them, by the batch. A change of the batch makes a new one."""
_diagonal: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Stamps of batches, and the diagonals of weights made of them, by the batch."""


def is_batch(weight: object, x: object) -> bool:
    """Return True if the weight, prepacked or not, or x has leading batch dimensions."""
    if isinstance(weight, PackedOperand):
        weight = weight.tensor
    if not isinstance(weight, Tensor) or not isinstance(x, Tensor) or weight.layout != torch.sparse_bsr:
        return False
    return x.dim() > 2 or (weight.dim() > 2 and x.dim() == 2)


def batched_product(name: str, bsr: Tensor | PackedOperand, x: Tensor, inp: Tensor | None, multiply: Multiply) -> Tensor:
    """Return bsr [..., M, K] @ x [..., K, N] plus ``inp`` by one product of matrices. The batches broadcast.

    A batch of ``x`` alone becomes further columns. A batch of weights with one ``x`` becomes one weight of more rows. With a batch
    of ``x`` it becomes one weight with the batch along its diagonal, whose absent blocks a kernel can skip at no cost.

    Raises InvalidProblemError if the sizes do not fit, or the batches do not broadcast.
    """
    weight = bsr.tensor if isinstance(bsr, PackedOperand) else bsr
    (*lead, m, k), (*batch, inner, n) = weight.shape, x.shape
    if inner != k:
        raise InvalidProblemError(f"{name}: shapes do not fit, got bsr {list(weight.shape)} and x {list(x.shape)}")
    try:
        whole = tuple(torch.broadcast_shapes(tuple(lead), tuple(batch)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise InvalidProblemError(f"{name}: got batches of {list(lead)} and {list(batch)}, which do not broadcast") from None
    if inp is not None:
        check_operands(name, [("inp", inp)])
        check_extra(name, [("inp", inp)], (*whole, m, n))
    if not lead:
        added = None if inp is None else inp.expand(*batch, m, n).movedim(-2, 0).reshape(m, math.prod(batch) * n)
        return multiply(bsr, x.movedim(-2, 0).reshape(k, math.prod(batch) * n), added).reshape(m, *batch, n).movedim(0, -2)
    if isinstance(bsr, PackedOperand):
        raise InvalidProblemError(f"{name}: got a prepacked batch of weights, expected one matrix; give the batch as it is")
    added = None if inp is None else inp.expand(*whole, m, n).reshape(math.prod(whole) * m, n)
    if math.prod(batch) == 1:
        return multiply(_joined(weight, _stacked, diagonal=False), x.reshape(k, n), added).reshape(*whole, m, n)
    if list(whole) != lead:
        raise InvalidProblemError(
            f"{name}: got batches of {lead} weights and {batch} matrices, expected weights for each matrix, or one; expand bsr"
        )
    rows = x.expand(*whole, k, n).reshape(math.prod(whole) * k, n)
    return multiply(_joined(weight, _diagonal, diagonal=True), rows, added).reshape(*whole, m, n)


def _joined(weight: Tensor, known: WeakIdKeyDictionary, *, diagonal: bool) -> Tensor:
    """Return the batch as one weight. It is kept until the batch changes, and made in each call if a gradient is wanted."""
    follows = torch.is_grad_enabled() and weight.requires_grad
    watched = parts(weight)
    kept: tuple[Stamp, Tensor] | None = None if follows else known.get(weight)  # type: ignore[no-untyped-call]
    if kept is not None and kept[0].holds(watched):
        return kept[1]
    stamp = Stamp.of(watched)
    made = _made(weight, diagonal=diagonal)
    if not follows:
        known[weight] = (stamp, made)
    return made


def _made(weight: Tensor, *, diagonal: bool) -> Tensor:
    crow, col, values = weight.crow_indices(), weight.col_indices(), weight.values()
    (*_, m, k), (*_, nnz, block_n, block_k) = weight.shape, values.shape
    crow = crow.reshape(-1, crow.shape[-1])
    count = len(crow)
    col, places = col.reshape(count, nnz), torch.arange(count, device=col.device, dtype=col.dtype).unsqueeze(1)
    starts = torch.cat([(crow[:, :-1] + places * nnz).reshape(-1), crow.new_full((1,), count * nnz)])
    if diagonal:
        col = col + places * (k // block_k)
    size = (count * m, count * k if diagonal else k)
    return assembled(starts, col.reshape(-1), values.reshape(count * nnz, block_n, block_k), size)
