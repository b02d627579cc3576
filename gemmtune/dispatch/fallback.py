"""A call by torch's own operations, where no choice takes it or a gradient is that of torch's composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import InvalidProblemError
from .arguments import Call


def by_torch(call: Call) -> torch.Tensor:
    """The operation's composition, then the epilogue function on its result. Differentiable where torch's parts are.

    Raises:
        InvalidProblemError: a scale does not fit its operand, or ``out`` the result.
    """
    operands = [call.operands.get(operand.role) for operand in call.operation.operands]
    result = call.operation.compose(*operands, *call.scalars, **call.options)
    return finished(call, result, call.epilogue, call.extra)


def finished(
    call: Call, result: torch.Tensor, epilogue: Callable[..., torch.Tensor] | None, extra: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What is left of a call when torch has the ``result`` of its product: ``epilogue``, its dtype, and the copy into ``out``."""
    row = call.operation
    if epilogue is not None and row.fused is not None and row.fused.default is not None:
        result = result.to(row.fused.default)
    dtype = call.out_dtype or row.result_of(epilogue=call.epilogue is not None).default
    if epilogue is not None:
        # A product of integers that only torch has becomes what the function makes of it.
        kept = result.dtype if result.is_floating_point() else None
        dtype = _cast_at_the_end(epilogue, result, extra) or dtype or kept
        result = epilogue(result, *extra)
    result = result if dtype is None else result.to(dtype)
    out = call.out
    if out is None:
        return result
    if out.shape != result.shape or out.dtype != result.dtype:
        raise InvalidProblemError(
            f"{call.name}: out must have shape {list(result.shape)} and dtype {result.dtype}, got {list(out.shape)} and {out.dtype}"
        )
    return out.copy_(result)


def _cast_at_the_end(epilogue: Callable[..., torch.Tensor], acc: torch.Tensor, extra: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype of the function's result if that does not follow the dtype of its argument: then it ends in a cast."""
    with torch.no_grad():
        ones = [x.detach().new_ones([1] * x.dim()) for x in extra]
        narrow, wide = (epilogue(acc.detach().new_ones((1, 1), dtype=dtype), *ones) for dtype in (torch.float16, torch.float64))
    return narrow.dtype if narrow.dtype == wide.dtype else None
