"""Grouped products: several products of different sizes in one call, as mixtures of experts have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..dispatch.block_calls import turned
from ..dispatch.grouped import form_of
from ..dispatch.keys import NOTHING
from ..problem.operations import Encoding
from .operate import is_compiling, operate

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ b for each group, *epilogue_args), in the four forms of torch's ``grouped_mm``:

    ==============  ===========  =============  =================================================================
    a               b            out            groups
    ==============  ===========  =============  =================================================================
    [M, K]          [G, K, N]    [M, N]         rows: those of group g are multiplied by b[g]
    [G, M, K]       [K, N]       [M, N]         columns: those of group g are a[g] @ b[:, g]
    [M, K]          [K, N]       [G, M, N]      terms: out[g] = a[:, g] @ b[g], 0 for a group without terms
    [G, M, K]       [G, K, N]    [G, M, N]      none: ``offs`` is None, and this is ``bmm``
    ==============  ===========  =============  =================================================================

    Args:
        a, b: any strides; float32, float16 or bfloat16, both the same.
        offs: int32 [G], where each group ends; group g begins where the one before it ends. It stays on the device and is never
            read by the host, so a CUDA graph that captured the call sees offsets that changed. Groups may be empty and of any size.
            Offsets that fall or pass the end are the caller's error: nothing outside of the operands is touched, the numbers are
            anything.
        out, epilogue, epilogue_args: as for ``mm``.

    Returns:
        ``out`` if it was given. Rows (columns) behind the last group hold anything, as torch leaves them.

    Raises:
        InvalidProblemError: (a RuntimeError and ValueError) operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    form = form_of("grouped_mm", a, b, offs)
    if not form.turned:
        return operate(form.op, form.operands, out, epilogue, epilogue_args)
    extra = tuple(map(turned, epilogue_args)) if epilogue_args else NOTHING
    followed = torch.is_grad_enabled() and any(x.requires_grad for x in (a, b, *extra))
    if out is None and (followed or is_compiling() or epilogue is not None):
        return operate(form.op, form.operands, None, epilogue, extra).t().contiguous()
    result = a.new_empty((a.shape[1], b.shape[1])) if out is None else out
    operate(form.op, form.operands, result.t(), epilogue, extra)
    return result


def mixed_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    *,
    encoding: Encoding = "",
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ (b[g] · scale_b[g]) for each group of rows, *epilogue_args) for narrow weights, widened in the kernel

    Args:
        a: [M, K] float32, float16 or bfloat16, any strides.
        b: [G, K, N] int8 or uint8, any strides; or with ``encoding`` uint8 [G, K/2, N], each matrix as ``pack_int4`` makes it.
        scale_b: [G, S, N], float32 or of a's dtype: with S = 1 one for each column, else one for each K/S = 32, 64 or 128 elements
            along K of a column.
        offs, out, epilogue, epilogue_args: as for ``grouped_mm``.
        encoding: ``int4`` (two's complement) or ``uint4`` for a packed ``b``.

    A kernel may round b · scale_b to the dtype of ``a``, as torch's composition does. There is no gradient.

    Returns:
        [M, N] of a's dtype, unless the epilogue ends in a cast.

    Raises:
        InvalidProblemError: operands that do not fit together, or one that requires grad.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    contiguous = [x.contiguous() if isinstance(x, Tensor) else x for x in (scale_b, offs)]
    return operate("mixed_grouped_mm", (a, b, *contiguous), out, epilogue, epilogue_args, (), (encoding,))
