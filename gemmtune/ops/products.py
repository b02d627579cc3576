"""The public operations. Each says what its arguments mean and hands them on; the path to a launch is the same for all.

Those of floats ask the native look-up themselves: a call of Python between costs a tenth of a small product on a CPU.
"""

from collections.abc import Callable, Sequence

import torch

from ..dispatch.keys import NOTHING
from ..dispatch.prepack import PackedOperand
from ..native.lookup import native
from ..problem.operations import Encoding
from ..quantized.arguments import float8_parts, parts_of
from ..quantized.weight import QuantizedWeight
from .operate import is_traced_by_dynamo, operate

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]


def mm(
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ b, *epilogue_args)

    Args:
        a: [M, K], any strides; float64, float32, float16 or bfloat16 (other dtypes run by torch).
        b: [K, N], any strides, of the dtype of ``a``; or a ``prepack``-ed operand.
        out: [M, N], any strides without overlap, sharing no memory with what is read.
        epilogue: a pointwise torch function of the product, computed in float32 (float64 for float64) and rounded once. If its
            last step is a cast, that is the dtype of the result; otherwise it is the dtype of ``a``.
        epilogue_args: tensors that broadcast to [M, N], given to ``epilogue`` after the product.

    Returns:
        [M, N]; ``out`` if it was given.

    Raises:
        InvalidProblemError: (a RuntimeError and ValueError) operands that do not fit together.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    if is_traced_by_dynamo() or (look_up := native.call) is None:
        return operate("mm", (a, b), out, epilogue, epilogue_args)
    return look_up("mm", out, epilogue, epilogue_args, NOTHING, NOTHING, None, None, a, b)  # type: ignore[no-any-return]


def addmm(
    inp: Tensor,
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(beta · inp + alpha · a @ b, *epilogue_args)

    ``inp`` broadcasts to [M, N] and has the dtype of ``a``; ``out`` may be ``inp`` itself. With ``beta`` zero, NaN and infinity in
    ``inp`` do not reach the result. The rest is as for ``mm``.
    """
    if is_traced_by_dynamo() or (look_up := native.call) is None:
        return operate("addmm", (a, b, inp), out, epilogue, epilogue_args, (alpha, beta))
    return look_up("addmm", out, epilogue, epilogue_args, (alpha, beta), NOTHING, None, None, a, b, inp)  # type: ignore[no-any-return]


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ b, *epilogue_args) for a batch: a [B, M, K], b [B, K, N], out [B, M, N]. The rest is as for ``mm``."""
    if is_traced_by_dynamo() or (look_up := native.call) is None:
        return operate("bmm", (a, b), out, epilogue, epilogue_args)
    return look_up("bmm", out, epilogue, epilogue_args, NOTHING, NOTHING, None, None, a, b)  # type: ignore[no-any-return]


def baddbmm(
    inp: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(beta · inp + alpha · a @ b, *epilogue_args) for a batch: ``inp`` broadcasts to [B, M, N]; as ``addmm``."""
    if is_traced_by_dynamo() or (look_up := native.call) is None:
        return operate("baddbmm", (a, b, inp), out, epilogue, epilogue_args, (alpha, beta))
    return look_up("baddbmm", out, epilogue, epilogue_args, (alpha, beta), NOTHING, None, None, a, b, inp)  # type: ignore[no-any-return]


def mm_plus_mm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ b + c @ d, *epilogue_args) for c [M, K2] and d [K2, N], any strides, of the dtype of ``a``

    The rest is as for ``mm``. A choice may round one of the products to the dtype of ``a`` before it adds the other one, as torch's
    composition ``torch.addmm(torch.mm(c, d), a, b)`` does.
    """
    return operate("mm_plus_mm", (a, b, c, d), out, epilogue, epilogue_args)


def int_mm(
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = a @ b of int8 as int32, exact while sums fit that, as they do for K below 2^17; or epilogue(float32 of it, …)

    Args:
        a: [M, K] int8, any strides.
        b: [K, N] int8, any strides; or a ``prepack``-ed operand.
        epilogue: a pointwise torch function of the sum as float32, rounded once. The result is float32, or what a cast at its end
            asks for: float16 or bfloat16.
        out, epilogue_args: as for ``mm``.

    Raises:
        InvalidProblemError: (a RuntimeError and ValueError) operands that do not fit together, or one that requires grad.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    return operate("int_mm", (a, b), out, epilogue, epilogue_args)


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
    return operate("int_mm_mul", (a, b), out, None, NOTHING, (), (), scale, out_dtype)


def mixed_mm(
    a: Tensor,
    b: Tensor | PackedOperand | QuantizedWeight,
    *,
    scale_b: Tensor | None = None,
    zero_b: Tensor | None = None,
    encoding: Encoding = "",
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(a @ ((b − zero_b) · scale_b), *epilogue_args) for a quantized b, which the kernel widens

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
    if b.__class__ is QuantizedWeight:
        b, scale_b, zero_b, encoding = parts_of("mixed_mm", b, scale_b, zero_b, encoding)
    operands = (a, b) if scale_b is None and zero_b is None else (a, b, scale_b) if zero_b is None else (a, b, scale_b, zero_b)
    return operate("mixed_mm", operands, out, epilogue, epilogue_args, (), (encoding,))


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
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue((a · scale_a) @ (b · scale_b) + bias, *epilogue_args) of 8-bit floats

    Args:
        a: [M, K] float8_e4m3fn or float8_e5m2, or as AMD's gfx942 has them float8_e4m3fnuz or float8_e5m2fnuz, any strides.
        b: [K, N] of any of them, any strides; or a ``prepack``-ed operand; or a ``QuantizedWeight`` with its scale.
        scale_a: float32: one element; [M, 1]; [M, ⌈K/128⌉] for blocks of 1×128; or [⌈M/128⌉, ⌈K/128⌉] for blocks of 128×128.
        scale_b: float32: one element; [1, N]; [⌈K/128⌉, N]; or [⌈K/128⌉, ⌈N/128⌉].
        bias: broadcasts to [M, N]: added in float32, before rounding. On a GPU, torch's product rounds before it adds a bias
            that is no row of ``out_dtype``.
        out_dtype: float32, float16 or bfloat16; a cast at the end of ``epilogue`` takes its place.
        fast_accum: 8-bit tensor cores may keep their narrow sum to the end (torch's ``use_fast_accum``).
        out, epilogue, epilogue_args: as for ``mm``.

    Raises:
        InvalidProblemError: operands that do not fit together, or one that requires grad.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
    """
    if scale_b is None or b.__class__ is QuantizedWeight:
        b, scale_b = float8_parts("scaled_mm", b, scale_b)
    operands = (a, b, scale_a, scale_b)
    return operate("scaled_mm", operands, out, epilogue, epilogue_args, (), (fast_accum,), bias, out_dtype)
