"""Grouped products by torch's own calls, sliced by offsets that the host can read at once, else whole products with masks."""

import functools
from collections.abc import Callable, Sequence

import torch

from ..passes import load, unwatched
from .compositions import scaled_composed, unpacked
from .layout import ALIGNED_BYTES

Tensor = torch.Tensor


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return a [M, K] @ b[g] [K, N] for the rows of each group g, which ends at offs[g]. Other rows are 0 or arbitrary."""
    if readable(offs) is None and _torch_takes(a, b, offs):
        return torch._grouped_mm(a, b, offs=offs)
    return of_each_group(lambda rows, g: a[rows] @ b[g], a.shape[0], offs)


def of_each_group(product: Callable[[slice, int], Tensor], total: int, offs: Tensor) -> Tensor:
    """Compute ``product(rows, g)`` for the rows of each group as one matrix; all rows, masked, if the host lacks the offsets."""
    ends = readable(offs)
    if ends is None:
        return masked(product, total, offs)
    pieces = [product(slice(start, end), g) for g, (start, end) in enumerate(spans(ends, total))]
    behind = total - sum(map(len, pieces))
    return torch.cat([*pieces, pieces[0].new_zeros((behind, pieces[0].shape[-1]))])


def masked(product: Callable[[slice, int], Tensor], total: int, offs: Tensor) -> Tensor:
    """Compute ``of_each_group`` without reading the offsets on the host."""
    rows = torch.arange(total, device=offs.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, rows, right=True)
    wholes = (product(slice(None), g) for g in range(offs.shape[0]))
    result = torch.zeros((), device=offs.device)
    for g, whole in enumerate(wholes):
        result = torch.where((group == g).unsqueeze(-1), whole, result.to(whole.dtype))
    return result


def masked_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Compute ``grouped_product`` with every matrix multiplying all rows."""
    return masked(lambda rows, g: a[rows] @ b[g], a.shape[0], offs)


def grouped_by_terms(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return a [M, K] @ b [K, N] over the terms of each group as [G, M, N]. Group g ends at offs[g]; an empty group gives 0."""
    ends = readable(offs)
    if ends is not None:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans(ends, a.shape[1])])
    return torch._grouped_mm(a, b, offs=offs) if _torch_takes(a, b, offs) else masked_by_terms(a, b, offs)


def masked_by_terms(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Compute ``grouped_by_terms`` without reading the offsets: each group sums over all terms, with the others' terms set to 0."""
    terms = torch.arange(a.shape[1], device=a.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, terms, right=True)
    of_group = [(group == g) for g in range(offs.shape[0])]
    pairs = ((torch.where(own, a, 0), torch.where(own.unsqueeze(-1), b, 0)) for own in of_group)
    return torch.stack([left @ right for left, right in pairs])


def _torch_takes(a: Tensor, b: Tensor, offs: Tensor) -> bool:
    """Return True if ``torch._grouped_mm`` accepts these operands. torch.func has no rule for it; fake tensors must be bfloat16."""
    if a.dtype != torch.bfloat16 or any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in (a, b, offs)):
        return False
    layouts = [(x.shape[-2:], x.stride()[-2:]) for x in (a, b)]
    return all(grouped_by_torch(size, stride, x.element_size()) for (size, stride), x in zip(layouts, (a, b), strict=True))


def grouped_by_torch(size: Sequence[int], stride: Sequence[int], itemsize: int) -> bool:
    """Return True if ``torch._grouped_mm`` takes the matrix: contiguous rows or columns that start at ALIGNED_BYTES."""
    (rows, cols), (row, col) = size, stride
    by_rows = col == 1 and row >= max(cols, 1) and row * itemsize % ALIGNED_BYTES == 0
    by_cols = row == 1 and col >= max(rows, 1) and col * itemsize % ALIGNED_BYTES == 0
    return by_rows or by_cols


def widened(b: Tensor, scale: Tensor, encoding: str, dtype: torch.dtype) -> Tensor:
    """Return b · scale_b for the weights of all groups: [G, K, N] of ``dtype``, each step rounded as eager torch does."""
    if scale.numel() > 0 and unwatched(b, scale) and (kernel := load("dequantize")).serves(b, scale, None, dtype):
        block = (b.shape[1] * (2 if encoding else 1) // scale.shape[1], 1)
        made: Tensor = kernel.dequantize(b, scale, None, encoding, dtype, (block, block))
        return made
    wide = torch.promote_types(dtype, scale.dtype)
    numbers = unpacked(b, encoding).to(wide)
    if scale.shape[1] > 1:  # a number for each group along K
        count, k, n = numbers.shape
        parts = numbers.view(count, scale.shape[1], k // scale.shape[1], n)
        return (parts * scale.to(wide).unsqueeze(2)).flatten(1, 2).to(dtype)
    return (numbers * scale.to(wide)).to(dtype)


def mixed_grouped(a: Tensor, b: Tensor, scale: Tensor, offs: Tensor, encoding: str = "") -> Tensor:
    """Return a @ (b[g] · scale_b[g]) for the rows of each group."""
    return grouped_product(a, widened(b, scale, encoding, a.dtype), offs)


def readable(offs: Tensor) -> list[int] | None:
    """Return the offsets as numbers if that needs no synchronization and hides nothing from torch's tracers; otherwise None."""
    if offs.device.type != "cpu" or type(offs) is not Tensor or torch.compiler.is_compiling():
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(offs):
        return None
    return offs.tolist()


def spans(ends: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Return the start and end of each group. Ends that decrease or lie outside ``total`` give shorter or empty groups."""
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
"""Activations of gated products."""


def gated_columns(product: Tensor, gated: str) -> Tensor:
    """Return act(first half of the columns) · second half."""
    gates, others = product.chunk(2, dim=-1)
    return GATES[gated](gates) * others


def routed(a: Tensor, b: Tensor, offs: Tensor, rows: Tensor | None, gated: str = "") -> Tensor:
    """Compute grouped_mm of a[rows], with gated columns. Both the row index and the gate are optional."""
    product = grouped_product(a if rows is None else a.index_select(0, rows), b, offs)
    return gated_columns(product, gated) if gated else product


def combined(a: Tensor, b: Tensor, offs: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Compute grouped_mm, then weight its rows and add them up by token."""
    return added_by_token(grouped_product(a, b, offs), offs, slots, weights)


def added_by_token(product: Tensor, offs: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Return out[t] = Σ_c weights[t, c] · the row of ``product`` in slot t · C + c. Rows behind the last group add nothing."""
    rows = within_groups(product, offs)
    placed = torch.zeros_like(rows).index_copy(0, slots.long(), rows)
    weighted = placed.view(*weights.shape, placed.shape[1]) * weights.to(product.dtype).unsqueeze(-1)
    return weighted.sum(dim=1)


def added_alike(product: Tensor, offs: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Return ``added_by_token``, added up in float32 in the order of C. No other token shows in the bits of a token."""
    rows = within_groups(product, offs)
    placed = torch.zeros_like(rows).index_copy(0, slots.long(), rows).view(*weights.shape, -1)
    weighted = placed.float() * weights.float().unsqueeze(-1)
    return functools.reduce(torch.add, weighted.unbind(1)).to(product.dtype)


def within_groups(x: Tensor, offs: Tensor) -> Tensor:
    """Return x with zeros in the rows behind the last group. Their gradients are zeros, too."""
    present = torch.arange(x.shape[0], device=offs.device, dtype=offs.dtype) < offs[-1]
    return torch.where(present.unsqueeze(-1), x, 0)


def scaled_grouped(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    fast_accum: bool = False,  # noqa: ARG001
) -> Tensor:
    """Return (a · scale_a) @ (b[g] · scale_b[g]) for the rows of each group, as float32."""
    return of_each_group(lambda rows, g: scaled_composed(a[rows], b[g], scale_a[rows], scale_b[g]), a.shape[0], offs)
