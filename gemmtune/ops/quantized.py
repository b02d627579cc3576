"""The operations on quantized operands: int_mm, int_mm_mul, mixed_mm, scaled_mm.

As the dense ones, each looks for a plan under a key that it can read off the operands; the rest is on the path of calls that have
no plan yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ..dispatch.arguments import Call
from ..dispatch.call import composed, run
from ..dispatch.calls import int_mm_call, int_mm_mul_call, mixed_mm_call, scaled_mm_call
from ..dispatch.keys import NOTHING, key_of
from ..dispatch.plan import keep_ready, ready
from ..dispatch.prepack import PackedOperand
from ..dispatch.weights import QuantizedWeight, parts_of
from ..errors import InvalidProblemError
from ..problem.operations import Encoding

__all__ = ["int_mm", "int_mm_mul", "mixed_mm", "scaled_mm"]

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]


def int_mm(
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = a @ b of int8 as int32, exact while sums fit that, as they do for K below 2^17; or epilogue(float32 of it, …)

    Args:
        a: [M, K] int8, any strides.
        b: [K, N] int8, any strides; or a ``prepack``-ed operand.
        out: [M, N], any strides without overlap, sharing no memory with what is read.
        epilogue: a pointwise torch function of the sum as float32, rounded once. The result is float32, or what a cast at its end
            asks for: float16 or bfloat16.
        epilogue_args: tensors that broadcast to [M, N], given to ``epilogue`` after the sum.

    Returns:
        [M, N]; ``out`` if it was given.

    Raises:
        InvalidProblemError: (a RuntimeError and ValueError) operands that do not fit together, or one that requires grad.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    key = None
    if out is None and epilogue is None and epilogue_args is NOTHING and not torch.compiler.is_compiling():
        key = key_of("int_mm", a, b)
        if key is not None and (plan := ready.get(key)) is not None:
            return plan.new((a, b.for_choice(plan.choice) if isinstance(b, PackedOperand) else b), ())
    return _planned(key, int_mm_call(a, b, out=out, epilogue=epilogue, epilogue_args=epilogue_args))


def int_mm_mul(
    a: Tensor,
    b: Tensor | PackedOperand,
    scale: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out = (a @ b) · scale: int_mm with the multiplication fused, so that the int32 sums are never stored

    Args:
        a, b: as for ``int_mm``.
        scale: float32, float16 or bfloat16, broadcasting to [M, N]: such as [N] for a scale of each column, or [M, 1].
        out_dtype: float32, float16 or bfloat16; by default that of ``scale``, as torch promotes. The product is computed in
            float32 and rounded once.
        out: as for ``int_mm``.

    Raises:
        InvalidProblemError: operands that do not fit together, or one that requires grad.
    """
    key = None
    if out is None and not torch.compiler.is_compiling():
        extra = (scale,)
        key = key_of("int_mm_mul", a, b, extra, out_dtype)
        if key is not None and (plan := ready.get(key)) is not None:
            return plan.new((a, b.for_choice(plan.choice) if isinstance(b, PackedOperand) else b, *extra), ())
    return _planned(key, int_mm_mul_call(a, b, scale, out_dtype=out_dtype, out=out))


def mixed_mm(
    a: Tensor,
    b: Tensor | PackedOperand | QuantizedWeight,
    *,
    scale_b: Tensor | None = None,
    zero_b: Tensor | None = None,
    encoding: Encoding = "",
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = epilogue(a @ ((b − zero_b) · scale_b), *epilogue_args) for a narrow b, which is widened inside the kernel

    Args:
        a: [M, K] float32, float16 or bfloat16, any strides.
        b: [K, N] int8, uint8, float8_e4m3fn or float8_e5m2, any strides; or with ``encoding`` uint8 [K/2, N], see ``pack_int4``;
            or a ``prepack``-ed operand; or a ``QuantizedWeight``, which brings the next three along.
        scale_b: float32 or of a's dtype: one element, [1, N], or [⌈K/g⌉, N] with a number for each g = 32, 64 or 128 elements along
            K of a column. None means 1.
        zero_b: as ``scale_b``; needs one. None means 0.
        encoding: ``int4`` (two's complement) or ``uint4`` for a packed ``b``.
        out, epilogue, epilogue_args: as for ``mm``.

    A kernel may round (b − zero_b) · scale_b to the dtype of ``a``, as torch's composition does, which also gives the gradients.

    Returns:
        [M, N] of a's dtype, unless the epilogue ends in a cast.

    Raises:
        InvalidProblemError: operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    b, scale_b, zero_b, encoding = parts_of("mixed_mm", b, scale_b, zero_b, encoding)
    key = None
    if out is None and epilogue is None and epilogue_args is NOTHING and not torch.compiler.is_compiling():
        extra = () if scale_b is None else (scale_b,) if zero_b is None else (scale_b, zero_b)
        key = key_of("mixed_mm", a, b, extra, encoding) if scale_b is not None or zero_b is None else None
        if key is not None and (plan := ready.get(key)) is not None:
            return plan.new((a, b.for_choice(plan.choice) if isinstance(b, PackedOperand) else b, *extra), ())
    call = mixed_mm_call(
        a, b, scale_b=scale_b, zero_b=zero_b, encoding=encoding, out=out, epilogue=epilogue, epilogue_args=epilogue_args
    )
    return _planned(key, call)


def scaled_mm(
    a: Tensor,
    b: Tensor | PackedOperand | QuantizedWeight,
    scale_a: Tensor,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Tensor:
    """out = epilogue((a · scale_a) @ (b · scale_b) + bias, *epilogue_args) of 8-bit floats

    Args:
        a: [M, K] float8_e4m3fn or float8_e5m2, any strides.
        b: [K, N] of either dtype, any strides; or a ``prepack``-ed operand; or a ``QuantizedWeight`` with its scale.
        scale_a: float32: one element; [M, 1]; [M, ⌈K/128⌉] for blocks of 1×128; or [⌈M/128⌉, ⌈K/128⌉] for blocks of 128×128.
        scale_b: float32: one element; [1, N]; [⌈K/128⌉, N]; or [⌈K/128⌉, ⌈N/128⌉].
        bias: broadcasts to [M, N]: added in float32, before rounding.
        out_dtype: float32, float16 or bfloat16; a cast at the end of ``epilogue`` takes its place.
        fast_accum: 8-bit tensor cores may keep their narrow sum to the end (torch's ``use_fast_accum``).
        out, epilogue, epilogue_args: as for ``mm``.

    Raises:
        InvalidProblemError: operands that do not fit together, or one that requires grad.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    key = None
    if out is None and epilogue is None and epilogue_args is NOTHING and not torch.compiler.is_compiling():
        numbers, scales, _, _ = parts_of("scaled_mm", b, scale_b)
        extra = (scale_a, scales) if bias is None else (scale_a, scales, bias)
        key = key_of("scaled_mm", a, numbers, extra, (out_dtype, fast_accum))
        if key is not None and (plan := ready.get(key)) is not None:
            operand = numbers.for_choice(plan.choice) if isinstance(numbers, PackedOperand) else numbers
            return plan.new((a, operand, *extra), ())
    call = scaled_mm_call(
        a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum, out=out, epilogue=epilogue,
        epilogue_args=epilogue_args,
    )  # fmt: skip
    return _planned(key, call)


def _planned(key: Hashable | None, call: Call) -> Tensor:
    if torch.compiler.is_compiling():
        # Inside torch.compile these are torch's operations, which its compiler knows.
        return call.by_torch()
    if torch.is_grad_enabled():
        wanting = [name for name, x in call.inputs if isinstance(x, Tensor) and x.requires_grad]
        if wanting and call.op == "mixed_mm":
            return composed(call)
        if wanting:
            raise InvalidProblemError(
                f"{call.name}: {wanting[0]} requires grad, but the operation has no gradient; detach it, or use torch.no_grad()"
            )
    result, plan = run(call)
    if key is not None and plan is not None:
        keep_ready(key, plan)
    return result
