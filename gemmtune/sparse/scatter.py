"""Scattered products of torch, in its three index formats: sums of products of listed blocks and matrices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..dispatch.checks import check_out
from ..errors import InvalidProblemError
from ..numerics.block_sparse import assembled, rows_of
from .products import bsr_mm

Tensor = torch.Tensor
FORMATS = {"scatter_mm": 3, "bsr_strided_mm": 6, "bsr_strided_mm_compressed": 5}
"""Number of parts of ``indices_data``, its name included, by format."""


class Terms(NamedTuple):
    """Products of block ``p`` and matrix ``q``, each added to result ``r``. All three are int64 of one length."""

    r: Tensor
    p: Tensor
    q: Tensor


def scatter_mm(blocks: Tensor, others: Tensor, indices_data: Sequence[Any], *, accumulators: Tensor | None = None) -> Tensor:
    """Return sums of blocks[p] @ others[q] for listed p and q, by the kernels of ``bsr_mm``.

    ``indices_data`` begins with the name of its format. ``torch.sparse._triton_ops.bsr_scatter_mm_indices_data`` makes it:

    - ``scatter_mm``, c_offsets [R + 1], pq [G, 2]: result r is the sum over g from c_offsets[r] to c_offsets[r + 1] of
      blocks[p_g] @ others[q_g]; others is [Q, Ks, Ns], the result [R, Ms, Ns].
    - ``bsr_strided_mm``, c_indices, r_offsets, p_offsets, q_offsets, meta: tiles of others [..., K, N] and of the result
      [..., M, N], of Ns = N / meta["SPLIT_N"] columns, given by the offset of their first element in a row-major matrix.
    - ``bsr_strided_mm_compressed``, c_indices, r_offsets, q_offsets, meta: the same, with consecutive blocks for each block row.
      The results may come in any order.

    Args:
        blocks: [P, Ms, Ks].
        accumulators: tensor to which the sums are added in place, and which is returned. None means zeros.

    Raises:
        InvalidProblemError: the format is unknown, or shapes or offsets do not fit it.
    """
    _check_format("scatter_mm", indices_data)
    if blocks.dim() != 3 or others.dim() < 2 or (indices_data[0] == "scatter_mm" and others.dim() != 3):
        raise InvalidProblemError(
            f"scatter_mm: got blocks {list(blocks.shape)} and others {list(others.shape)} of other dimensions"
        )
    kind, count = indices_data[0], len(indices_data)
    if count != FORMATS[kind]:
        raise InvalidProblemError(f"scatter_mm: {kind}: got {count} parts of indices_data, expected {FORMATS[kind]}")
    if kind == "scatter_mm":
        return _of_lists(blocks, others, *indices_data[1:], accumulators=accumulators)
    return _of_tiles(blocks, others, indices_data, accumulators)


def bsr_scatter_mm(bsr: Tensor, other: Tensor, indices_data: Sequence[Any] | None = None, out: Tensor | None = None) -> Tensor:
    """Return bsr @ other for other [..., K, N], by ``bsr_mm``. The lists of ``indices_data`` follow from ``bsr`` and are not read.

    Raises:
        InvalidProblemError: ``bsr_mm`` refuses the operands, or the index format is unknown.
    """
    if indices_data is not None:
        _check_format("bsr_scatter_mm", indices_data)
    if other.dim() < 2:
        raise InvalidProblemError(f"bsr_scatter_mm: other: got shape {list(other.shape)}, expected [..., {bsr.shape[1]}, N]")
    columns = other.movedim(-2, 0).flatten(1)
    result = bsr_mm(bsr, columns).reshape(bsr.shape[0], *other.shape[:-2], other.shape[-1]).movedim(0, -2)
    if out is None:
        return result.contiguous()
    check_out("bsr_scatter_mm", out, result.shape, result.dtype, result.device, [])
    return out.copy_(result)


def _check_format(op: str, indices_data: Sequence[Any]) -> None:
    known = isinstance(indices_data, Sequence)
    if not known or not len(indices_data) or indices_data[0] not in FORMATS:
        got = type(indices_data).__name__ if not known else repr(indices_data[0]) if len(indices_data) else "nothing"
        raise InvalidProblemError(f"{op}: indices_data: got {got}, expected one of {', '.join(FORMATS)}")


def _of_lists(blocks: Tensor, others: Tensor, c_offsets: Tensor, pq: Tensor, *, accumulators: Tensor | None) -> Tensor:
    if pq.dim() != 2 or pq.shape[1] != 2:
        raise InvalidProblemError(f"scatter_mm: pq: got a tensor of shape {list(pq.shape)}, expected [products, 2]")
    if not len(c_offsets) or (int(c_offsets[0]), int(c_offsets[-1])) != (0, len(pq)) or bool((c_offsets.diff() < 0).any()):
        got = c_offsets.tolist()[:8]
        raise InvalidProblemError(f"scatter_mm: c_offsets: got {got}, expected offsets that rise from 0 to {len(pq)}")
    terms = Terms(r=rows_of(c_offsets), p=pq[:, 0].long(), q=pq[:, 1].long())
    return _accumulated(_added_up(blocks, others, terms, len(c_offsets) - 1), accumulators)


def _accumulated(result: Tensor, accumulators: Tensor | None) -> Tensor:
    if accumulators is None:
        return result
    if accumulators.shape != result.shape:
        got, expected = list(accumulators.shape), list(result.shape)
        raise InvalidProblemError(f"scatter_mm: accumulators: got a tensor of shape {got}, expected {expected}")
    return accumulators.add_(result)


def _of_tiles(blocks: Tensor, others: Tensor, indices_data: Sequence[Any], accumulators: Tensor | None) -> Tensor:
    """Return the sums for offsets of tiles, for each matrix of the batch."""
    *_, meta = indices_data
    (_, rows, depth), (*batch, k, n) = blocks.shape, others.shape
    splits = int(meta.get("SPLIT_N", 0))
    if splits < 1 or not n:
        raise InvalidProblemError(f"scatter_mm: got SPLIT_N {splits} for {n} columns, expected at least one part and one column")
    if accumulators is not None and accumulators.dim() < 2:
        got = list(accumulators.shape)
        raise InvalidProblemError(f"scatter_mm: accumulators: got a tensor of shape {got}, expected [..., M, {n}]")
    if k % depth or n % splits:
        raise InvalidProblemError(
            f"scatter_mm: got others {list(others.shape)}, expected multiples of {depth} rows, {splits} columns"
        )
    offsets, terms = _terms_of_tiles(indices_data, n, (rows, depth, n // splits), splits)
    m = accumulators.shape[-2] if accumulators is not None else int(offsets.max()) // n + rows if len(offsets) else 0
    flat = (
        others.reshape(-1, k // depth, depth, splits, n // splits)
        .transpose(2, 3)
        .reshape(-1, k // depth * splits, depth, n // splits)
    )
    sums = [_added_up(blocks, tiles, terms, m // rows * splits) for tiles in flat]
    whole = torch.stack(sums).reshape(*batch, m // rows, splits, rows, n // splits).transpose(-3, -2).reshape(*batch, m, n)
    return _accumulated(whole, accumulators)


def _terms_of_tiles(data: Sequence[Any], n: int, tile: tuple[int, int, int], splits: int) -> tuple[Tensor, Terms]:
    """Return the offsets of the results, and the products by tile numbers. Tiles are numbered row by row."""
    rows, depth, columns = tile
    starts, offsets = data[1].long(), data[2].long()

    def place(offset: Tensor, height: int) -> Tensor:
        row, col = offset // n, offset % n
        if bool((row % height).any()) or bool((col % columns).any()):
            raise InvalidProblemError(
                f"scatter_mm: got an offset inside of a tile of {height}x{columns}, expected its first element"
            )
        return row // height * splits + col // columns

    where = place(offsets, rows)
    if data[0] == "bsr_strided_mm":
        return offsets, Terms(r=where[rows_of(starts)], p=data[3].long(), q=place(data[4].long(), depth))
    block_row, split = where // splits, where % splits
    first, behind = starts[block_row], starts[block_row + 1]
    which = torch.arange(len(offsets), device=offsets.device).repeat_interleave(behind - first)
    before = torch.nn.functional.pad((behind - first).cumsum(0), (1, 0))[:-1]
    inner = torch.arange(len(which), device=offsets.device) - before[which]
    listed = (split * behind + (splits - split) * first)[which] + inner
    return offsets, Terms(r=where[which], p=first[which] + inner, q=place(data[3].long()[listed], depth))


def _added_up(blocks: Tensor, others: Tensor, terms: Terms, count: int) -> Tensor:
    """Return the results [count, Ms, Ns], by a block-sparse product with the stacked matrices."""
    (held, rows, depth), (matrices, height, columns) = blocks.shape, others.shape
    if height != depth:
        raise InvalidProblemError(f"scatter_mm: got blocks of {depth} columns and others of {height} rows, expected as many")
    for label, places, most in (("results", terms.r, count), ("blocks", terms.p, held), ("others", terms.q, matrices)):
        outside = places[(places < 0) | (places >= most)]
        if len(outside):
            raise InvalidProblemError(f"scatter_mm: got {int(outside[0])} among {label}, expected 0 to {most - 1}")
    order = torch.argsort(terms.r * max(matrices, 1) + terms.q, stable=True)
    r, p, q = (part[order] for part in terms)
    if bool(((r[1:] == r[:-1]) & (q[1:] == q[:-1])).any()):  # a sum has one matrix twice: each product gets a copy
        others, q = others[q], torch.arange(len(q), device=q.device)
    starts = torch.nn.functional.pad(torch.bincount(r, minlength=count).cumsum(0), (1, 0))
    weight = assembled(starts.int(), q.int(), blocks[p].contiguous(), (count * rows, len(others) * depth))
    return bsr_mm(weight, others.reshape(-1, columns)).reshape(count, rows, columns)
