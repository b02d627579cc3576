"""torch's own operations, for calls that no choice takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..errors import InvalidProblemError
from ..problem.compositions import dequantized, int_product, scaled_product

__all__ = ["torch_call", "torch_quantized", "torch_sum"]

EpilogueFunction = Callable[..., torch.Tensor]


def torch_call(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    inp: torch.Tensor | None,
    alpha: float,
    beta: float,
    out: torch.Tensor | None,
    epilogue: EpilogueFunction | None,
    epilogue_args: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """A dense ``op`` by torch, then the epilogue function on its result."""
    direct = out if epilogue is None else None
    if inp is None:
        result = getattr(torch, op)(a, b) if direct is None else getattr(torch, op)(a, b, out=direct)
    else:
        scalars: dict[str, Any] = {"alpha": alpha, "beta": beta}
        result = (
            getattr(torch, op)(inp, a, b, **scalars) if direct is None else getattr(torch, op)(inp, a, b, **scalars, out=direct)
        )
    if epilogue is None:
        return result  # type: ignore[no-any-return]
    value = epilogue(result, *epilogue_args)
    return value if out is None else out.copy_(value)


def torch_sum(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    out: torch.Tensor | None,
    epilogue: EpilogueFunction | None,
    epilogue_args: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """mm_plus_mm by torch, then the epilogue function on its result."""
    result = torch_call("addmm", a, b, torch.mm(c, d), 1, 1, out, epilogue, epilogue_args)
    return result


def torch_quantized(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    zero_b: torch.Tensor | None = None,
    encoding: str = "",
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    extra: tuple[torch.Tensor, ...] = (),
    name: str = "",
) -> torch.Tensor:
    """int_mm, mixed_mm or scaled_mm by torch, then the epilogue function on its result. Differentiable where torch's parts are.

    Raises:
        InvalidProblemError: a scale does not fit its operand, or ``out`` the result.
    """
    dtype = out_dtype
    if op == "int_mm":
        result = int_product(a, b) if _is_plain(a, b) else (a.double() @ b.double()).to(torch.int32)
        result = result if epilogue is None else result.to(torch.float32)
    elif op == "mixed_mm":
        result = torch.mm(a, dequantized(b, scale_b, zero_b, encoding, a.dtype))
    else:
        if scale_a is None or scale_b is None:
            raise InvalidProblemError(f"{name or op}: expected scale_a and scale_b")
        kind = a.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext():
            result = scaled_product(a, b, scale_a, scale_b)
        dtype = dtype or torch.bfloat16
    if epilogue is not None:
        dtype = _cast_at_the_end(epilogue, result, extra) or dtype or result.dtype
        result = epilogue(result, *extra)
    result = result if dtype is None else result.to(dtype)
    if out is None:
        return result
    if out.shape != result.shape or out.dtype != result.dtype:
        raise InvalidProblemError(
            f"{name or op}: out must have shape {list(result.shape)} and dtype {result.dtype}, "
            f"got {list(out.shape)} and {out.dtype}"
        )
    return out.copy_(result)


def _is_plain(*tensors: torch.Tensor) -> bool:
    """torch has no rule for ``_int_mm`` within its function transforms."""
    return torch.compiler.is_compiling() or not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def _cast_at_the_end(epilogue: EpilogueFunction, acc: torch.Tensor, extra: tuple[torch.Tensor, ...]) -> torch.dtype | None:
    """The dtype of the function's result if that does not follow the dtype of its argument: then it ends in a cast."""
    with torch.no_grad():
        ones = [x.detach().new_ones([1] * x.dim()) for x in extra]
        narrow, wide = (epilogue(acc.detach().new_ones((1, 1), dtype=dtype), *ones) for dtype in (torch.float16, torch.float64))
    return narrow.dtype if narrow.dtype == wide.dtype else None
