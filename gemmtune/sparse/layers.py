"""The product of rows of tokens with a block-sparse weight, as layers have it."""

from __future__ import annotations

import torch

from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..problem.operations import OPERATIONS
from .products import multiplied, weight_of

Tensor = torch.Tensor


def linear(x: Tensor, bsr: Tensor | PackedOperand, bias: Tensor | None = None) -> Tensor:
    """x @ bsrᵀ + bias, as ``torch.nn.functional.linear`` has it. All is row-major, so that nothing is transposed in memory.

    Args:
        x: [..., K] of one dimension or more, of the dtype of ``bsr``.
        bsr: [N, K], as for ``bsr_mm``, ``prepack`` of one included.
        bias: [N], of the dtype of ``bsr``, which is float64, float32, float16 or bfloat16 then.

    Returns:
        [..., N], contiguous, of the dtype that ``bsr_mm`` has. ``x``, ``bsr`` and ``bias`` have gradients.

    Raises:
        InvalidProblemError: shapes that do not fit together, or what ``bsr_mm`` and ``bsr_addmm`` refuse.
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
        result = multiplied(name, bsr, rows.t(), added, scalars).t()
    else:
        dtype = OPERATIONS[name].result_dtype(weight.dtype, epilogue=False)
        result = x.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)
        multiplied(name, bsr, rows.t(), added, scalars, out=result.t())
    return result.reshape(*size[:-1], weight.shape[0])
