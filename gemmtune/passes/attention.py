"""Kernels of attention for one query: the keys are split over blocks, whose results a second kernel combines.

A block serves all query heads that share a head of the keys, so it reads keys and values once. The module needs Triton and is
imported only to launch the kernels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

__all__ = ["OutOfResources", "attend"]

LEAST_ROWS = 16
"""Least number of rows of a tile that the tensor cores multiply. Rows beyond the query heads are masked."""
_jit: Any = triton.jit


@_jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, bias, out, sums, scale, keys, span, key_heads, q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row,
    bias_batch, bias_head, bias_row, group: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, splits: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    batch, key_head = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    split = tl.program_id(1)
    row, column, places = tl.arange(0, rows), tl.arange(0, columns), tl.arange(0, block)
    head = key_head * group + row
    real, wide = row < group, column < width
    whole = real[:, None] & wide[None, :]
    queries = tl.load(q + batch.to(tl.int64) * q_batch + head[:, None] * q_head + column[None, :], mask=whole, other=0.0)
    k += batch.to(tl.int64) * k_batch + key_head * k_head
    v += batch.to(tl.int64) * v_batch + key_head * v_head
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, columns], tl.float32)
    for begin in range(split * span, tl.minimum(split * span + span, keys), block):
        place = begin + places
        inside = place < keys
        long = place.to(tl.int64)
        ks = tl.load(k + long[None, :] * k_row + column[:, None], mask=inside[None, :] & wide[:, None], other=0.0)
        vs = tl.load(v + long[:, None] * v_row + column[None, :], mask=inside[:, None] & wide[None, :], other=0.0)
        scores = tl.dot(queries, ks, input_precision="ieee") * scale
        if biased:
            at = bias + batch.to(tl.int64) * bias_batch + head[:, None] * bias_head + place[None, :] * bias_row
            scores += tl.load(at, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)  # so far all keys are masked
        weights, before = tl.exp(scores - finite[:, None]), tl.exp(top - finite)
        total = total * before + tl.sum(weights, 1)
        acc = acc * before[:, None] + tl.dot(weights.to(vs.dtype), vs, input_precision="ieee")
        top = new
    which = (batch * key_heads * group + head).to(tl.int64)
    if splits == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        which = which * splits + split
        tl.store(sums + which * 2, top, mask=real)
        tl.store(sums + which * 2 + 1, total, mask=real)
    tl.store(out + which[:, None] * width + column[None, :], acc.to(out.dtype.element_ty), mask=whole)


@_jit  # type: ignore[untyped-decorator]
def _combine(parts, sums, out, width: tl.constexpr, columns: tl.constexpr, splits: tl.constexpr, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    head, split, column = tl.program_id(0).to(tl.int64), tl.arange(0, padded), tl.arange(0, columns)
    there, wide = split < splits, column < width
    at = head * splits + split
    top = tl.load(sums + at * 2, mask=there, other=float("-inf"))
    total = tl.load(sums + at * 2 + 1, mask=there, other=0.0)
    acc = tl.load(parts + at[:, None] * width + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    highest = tl.max(top, 0)
    weights = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(total * weights, 0)
    result = tl.sum(acc * weights[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + head * width + column, result.to(out.dtype.element_ty), mask=wide)


def attend(
    q: torch.Tensor,  # (batch, heads, 1, width)
    k: torch.Tensor,  # (batch, key heads, keys, width)
    v: torch.Tensor,  # (batch, key heads, keys, width)
    bias: torch.Tensor | None,  # (batch or 1, heads or 1, 1, keys)
    out: torch.Tensor,  # (batch, heads, 1, width), contiguous
    *,
    scale: float,
    splits: int,
    block: int,
    warps: int,
) -> None:
    """Write softmax(scale · q·kᵀ + bias)·v into ``out``, and 0 for a query whose keys are all masked.

    Sums are float32, and the weights of the keys are rounded to the dtype of ``v``. Rows are contiguous. The keys are processed
    in ``splits`` parts, ``block`` of them at a time.
    """
    (batch, heads, _, width), key_heads, keys = q.shape, k.shape[1], k.shape[2]
    group, columns = heads // key_heads, triton.next_power_of_2(width)
    parts = sums = out
    if splits > 1:
        memory = torch.empty(batch * heads * splits * (width + 2), dtype=torch.float32, device=q.device)
        parts, sums = memory[: batch * heads * splits * width], memory[batch * heads * splits * width :]
    added = q if bias is None else bias
    steps = [0 if bias is None or bias.shape[dim] == 1 else bias.stride(dim) for dim in (0, 1, 3)]
    span = triton.cdiv(triton.cdiv(keys, splits), block) * block
    strides = [x.stride(dim) for x, dims in ((q, (0, 1)), (k, (0, 1, 2)), (v, (0, 1, 2))) for dim in dims]
    with torch.cuda.device(q.device):
        _attend[(batch * key_heads, splits)](
            q, k, v, added, parts, sums, scale, keys, span, key_heads, *strides, *steps, group,
            max(LEAST_ROWS, triton.next_power_of_2(group)), width, max(columns, LEAST_ROWS), block, splits, bias is not None,
            num_warps=warps, num_stages=3 if columns <= 128 else 2,
        )  # fmt: skip
        if splits > 1:
            _combine[(batch * heads,)](
                parts, sums, out, width, columns, splits, triton.next_power_of_2(splits), num_warps=1 if columns <= 64 else 2
            )
