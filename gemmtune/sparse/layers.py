"""Linear layers with a block-sparse weight."""

from __future__ import annotations

import torch

from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..problem.operations import OPERATIONS
from .calls import weight_of
from .products import multiplied

Tensor = torch.Tensor


def linear(x: Tensor, bsr: Tensor | PackedOperand, bias: Tensor | None = None) -> Tensor:
    """Return x @ bsrᵀ + bias, as ``torch.nn.functional.linear`` does. Nothing is transposed in memory.

    Args:
        x: [..., K] of one dimension or more, of the dtype of ``bsr``.
        bsr: [N, K], a weight for ``bsr_mm``, prepacked or not.
        bias: [N], of the dtype of ``bsr``. That dtype is then float64, float32, float16 or bfloat16.

    Returns:
        [..., N], contiguous, of the dtype that ``bsr_mm`` returns. ``x``, ``bsr`` and ``bias`` have gradients.

    Raises:
        InvalidProblemError: the shapes do not fit together, or ``bsr_mm`` or ``bsr_addmm`` refuses the operands.
    """
    weight = weight_of("linear", bsr)
    columns, size = weight.shape[1:], getattr(x, "shape", ())
    if not size or size[-1:] != columns or (bias is not None and getattr(bias, "shape", None) != weight.shape[:1]):
        got = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (x, weight, bias)]
        raise InvalidProblemError(
            f"linear: got x {got[0]}, bsr {got[1]} and bias {got[2]}, expected tensors x [..., K], bsr [N, K] and bias [N] or None"
        )
    rows = x.reshape(size[:-1].numel(), *columns)
    added = None if bias is None else bias.unsqueeze(-1)
    name, scalars = ("bsr_mm", ()) if bias is None else ("bsr_addmm", (1.0, 1.0))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        result = multiplied(name, bsr, rows.t(), added, scalars).t().contiguous()
    else:
        dtype = OPERATIONS[name].result_dtype(weight.dtype, epilogue=False)
        result = x.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)
        multiplied(name, bsr, rows.t(), added, scalars, out=result.t())
    return result.reshape(*size[:-1], weight.shape[0])
