"""Grouped products by torch's own calls: by the ends of groups if nobody waits for these, else each matrix multiplies all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .compositions import scaled_composed, unpacked
from .layout import ALIGNED_BYTES

Tensor = torch.Tensor


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """a [M, K] @ b[g] [K, N] for the rows of each group g, which ends at offs[g]; 0 or anything in rows behind the last one.

    Offsets that the host can read divide the rows; others are torch's business where its operation takes the operands.
    """
    if readable(offs) is None and _torch_takes(a, b, offs):
        return torch._grouped_mm(a, b, offs=offs)
    return of_each_group(lambda rows, g: a[rows] @ b[g], a.shape[0], offs)


def of_each_group(product: Callable[[slice, int], Tensor], total: int, offs: Tensor) -> Tensor:
    """``product(rows, g)`` for the rows of each group g as one matrix of ``total`` rows. Where the offsets cannot be read each
    group has all rows, of which its own are kept."""
    ends = readable(offs)
    if ends is None:
        return masked(product, total, offs)
    pieces = [product(slice(start, end), g) for g, (start, end) in enumerate(spans(ends, total))]
    behind = total - sum(map(len, pieces))
    return torch.cat([*pieces, pieces[0].new_zeros((behind, pieces[0].shape[-1]))])


def masked(product: Callable[[slice, int], Tensor], total: int, offs: Tensor) -> Tensor:
    """``of_each_group`` where the offsets stay where they are."""
    rows = torch.arange(total, device=offs.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, rows, right=True)
    wholes = (product(slice(None), g) for g in range(offs.shape[0]))
    result = torch.zeros((), device=offs.device)
    for g, whole in enumerate(wholes):
        result = torch.where((group == g).unsqueeze(-1), whole, result.to(whole.dtype))
    return result


def masked_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """``grouped_product`` where each matrix multiplies all rows."""
    return masked(lambda rows, g: a[rows] @ b[g], a.shape[0], offs)


def grouped_by_terms(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] over the terms of each group, as [G, M, N]: group g ends at offs[g]; 0 for a group without terms."""
    ends = readable(offs)
    if ends is not None:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans(ends, a.shape[1])])
    return torch._grouped_mm(a, b, offs=offs) if _torch_takes(a, b, offs) else masked_by_terms(a, b, offs)


def masked_by_terms(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The same where the offsets stay where they are: a product of all terms for each group, those of the others 0."""
    terms = torch.arange(a.shape[1], device=a.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, terms, right=True)
    of_group = [(group == g) for g in range(offs.shape[0])]
    pairs = ((torch.where(own, a, 0), torch.where(own.unsqueeze(-1), b, 0)) for own in of_group)
    return torch.stack([left @ right for left, right in pairs])


def _torch_takes(a: Tensor, b: Tensor, offs: Tensor) -> bool:
    """Whether ``torch._grouped_mm`` takes these operands: torch.func knows nothing of it, and of fake tensors it takes bfloat16."""
    if a.dtype != torch.bfloat16 or any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in (a, b, offs)):
        return False
    layouts = [(x.shape[-2:], x.stride()[-2:]) for x in (a, b)]
    return all(grouped_by_torch(size, stride, x.element_size()) for (size, stride), x in zip(layouts, (a, b), strict=True))


def grouped_by_torch(size: Sequence[int], stride: Sequence[int], itemsize: int) -> bool:
    """Whether ``torch._grouped_mm`` takes a matrix of that size: rows or columns that are contiguous, and begin at multiples of
    ALIGNED_BYTES if the first does."""
    (rows, cols), (row, col) = size, stride
    by_rows = col == 1 and row >= max(cols, 1) and row * itemsize % ALIGNED_BYTES == 0
    by_cols = row == 1 and col >= max(rows, 1) and col * itemsize % ALIGNED_BYTES == 0
    return by_rows or by_cols


def widened(b: Tensor, scale: Tensor, encoding: str, dtype: torch.dtype) -> Tensor:
    """b · scale_b for a weight of each group: [G, K, N] of ``dtype``, each step rounded as eager torch does."""
    numbers = torch.stack([unpacked(matrix, encoding) for matrix in b]) if encoding else b
    wide = torch.promote_types(dtype, scale.dtype)
    times = scale.to(wide).repeat_interleave(numbers.shape[1] // max(scale.shape[1], 1), 1)
    return (numbers.to(wide) * times).to(dtype)


def mixed_grouped(a: Tensor, b: Tensor, scale: Tensor, offs: Tensor, encoding: str = "") -> Tensor:
    """a @ (b[g] · scale_b[g]) for the rows of each group."""
    return grouped_product(a, widened(b, scale, encoding, a.dtype), offs)


def readable(offs: Tensor) -> list[int] | None:
    """Offsets as numbers where that makes nobody wait and torch does not have to see it; else None."""
    if offs.device.type != "cpu" or type(offs) is not Tensor or torch.compiler.is_compiling():
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(offs):
        return None
    return offs.tolist()


def spans(ends: Sequence[int], total: int) -> list[tuple[int, int]]:
    """The beginning and end of each group. Ends that fall, or lie outside of ``total``, give groups that are shorter or empty."""
    found: list[tuple[int, int]] = []
    begin = 0
    for given in ends:
        end = max(begin, min(given, total))
        found.append((begin, end))
        begin = end
    return found


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""The functions of gates."""


def gated_columns(product: Tensor, gated: str) -> Tensor:
    """act(gates) · the other half of the columns."""
    gates, others = product.chunk(2, dim=-1)
    return GATES[gated](gates) * others


def routed(a: Tensor, b: Tensor, offs: Tensor, rows: Tensor | None, gated: str = "") -> Tensor:
    """grouped_mm of a[rows], its columns gated; each as far as it is asked for."""
    product = grouped_product(a if rows is None else a.index_select(0, rows), b, offs)
    return gated_columns(product, gated) if gated else product


def combined(a: Tensor, b: Tensor, offs: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """grouped_mm, whose rows are weighted and added up by token."""
    return added_by_token(grouped_product(a, b, offs), offs, slots, weights)


def added_by_token(product: Tensor, offs: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """out[t] = Σ_c weights[t, c] · the row of ``product`` whose slot is t · C + c. Rows behind the last group count for nothing."""
    present = torch.arange(product.shape[0], device=offs.device, dtype=offs.dtype) < offs[-1]
    rows = torch.where(present.unsqueeze(-1), product, 0)
    placed = torch.zeros_like(rows).index_copy(0, slots.long(), rows)
    weighted = placed.view(*weights.shape, -1) * weights.to(product.dtype).unsqueeze(-1)
    return weighted.sum(dim=1)


def scaled_grouped(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    fast_accum: bool = False,  # noqa: ARG001
) -> Tensor:
    """(a · scale_a) @ (b[g] · scale_b[g]) for the rows of each group, as float32."""
    return of_each_group(lambda rows, g: scaled_composed(a[rows], b[g], scale_a[rows], scale_b[g]), a.shape[0], offs)
