"""Calls of the operations: what each public function makes of its arguments."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

import torch

from ..errors import InvalidProblemError
from ..problem.dtypes import dtype_name
from ..problem.operations import Encoding, Op
from .arguments import Call
from .fused import BiasThen, add_bias, factor_dtype, multiply
from .prepack import PackedOperand
from .weights import QuantizedWeight, parts_of

__all__ = [
    "CALLS",
    "int_mm_call",
    "int_mm_mul_call",
    "mixed_mm_call",
    "mm_plus_mm_call",
    "product_call",
    "scaled_mm_call",
    "sum_call",
    "tensor_of",
]

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]
RESULT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of quantized products that have no result dtype of their own."""
BIAS_DTYPES = (torch.float64, *RESULT_DTYPES)
"""What an epilogue takes as an operand that adds."""


def tensor_of(b: Tensor | PackedOperand) -> Tensor:
    """The operand as it was given to ``prepack``."""
    return b.tensor if isinstance(b, PackedOperand) else b


def _packed(b: Tensor | PackedOperand) -> PackedOperand | None:
    return b if isinstance(b, PackedOperand) else None


def product_call(
    op: Op,
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Call:
    """mm, bmm or int_mm."""
    _check_epilogue(op, epilogue, epilogue_args)
    if op == "bmm":
        _refuse_packed(op, b)
    return Call(op=op, a=a, b=tensor_of(b), packed=_packed(b), out=out, epilogue=epilogue, extra=tuple(epilogue_args))


def sum_call(
    op: Op,
    inp: Tensor,
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Call:
    """addmm or baddbmm."""
    call = product_call(op, a, b, out=out, epilogue=epilogue, epilogue_args=epilogue_args)
    if op == "baddbmm":
        _refuse_packed(op, b)
    call.inp, call.alpha, call.beta = inp, _number(op, "alpha", alpha), _number(op, "beta", beta)
    return call


def mm_plus_mm_call(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Call:
    """mm_plus_mm."""
    _check_epilogue("mm_plus_mm", epilogue, epilogue_args)
    for name, x in (("c", c), ("d", d)):
        if not isinstance(x, Tensor):
            raise InvalidProblemError(f"mm_plus_mm: {name} must be a torch.Tensor, got {type(x).__name__}")
    return Call(op="mm_plus_mm", a=a, b=b, c=c, d=d, out=out, epilogue=epilogue, extra=tuple(epilogue_args))


def int_mm_call(
    a: Tensor,
    b: Tensor | PackedOperand,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Call:
    """int_mm."""
    return product_call("int_mm", a, b, out=out, epilogue=epilogue, epilogue_args=epilogue_args)


def int_mm_mul_call(
    a: Tensor,
    b: Tensor | PackedOperand,
    scale: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Call:
    """int_mm with the factor as its epilogue."""
    if out_dtype is not None:
        _check_dtype("int_mm_mul", "out_dtype", out_dtype, RESULT_DTYPES)
    return Call(
        op="int_mm",
        name="int_mm_mul",
        a=a,
        b=tensor_of(b),
        packed=_packed(b),
        out=out,
        epilogue=multiply,
        extra=(scale,),
        extra_names=("scale",),
        out_dtype=out_dtype or (factor_dtype(scale.dtype) if isinstance(scale, Tensor) else None),
    )


def mixed_mm_call(
    a: Tensor,
    b: Tensor | PackedOperand | QuantizedWeight,
    *,
    scale_b: Tensor | None = None,
    zero_b: Tensor | None = None,
    encoding: Encoding = "",
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = (),
) -> Call:
    """mixed_mm."""
    b, scale_b, zero_b, encoding = parts_of("mixed_mm", b, scale_b, zero_b, encoding)
    call = product_call("mixed_mm", a, b, out=out, epilogue=epilogue, epilogue_args=epilogue_args)
    call.scale_b, call.zero_b, call.encoding = scale_b, zero_b, encoding
    return call


def scaled_mm_call(
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
) -> Call:
    """scaled_mm, a bias being the first part of its epilogue."""
    b, scale_b, zero_b, encoding = parts_of("scaled_mm", b, scale_b)
    if scale_b is None:
        raise InvalidProblemError("scaled_mm: scale_b: got None, expected a tensor, or b as a QuantizedWeight with scales")
    if encoding or zero_b is not None:
        raise InvalidProblemError(
            f"scaled_mm: b: got {encoding or 'zero points'}, expected 8-bit floats; mixed_mm multiplies integers"
        )
    _check_dtype("scaled_mm", "out_dtype", out_dtype, RESULT_DTYPES)
    if isinstance(bias, Tensor):
        _check_dtype("scaled_mm", "dtype of bias", bias.dtype, BIAS_DTYPES)
    _check_epilogue("scaled_mm", epilogue, epilogue_args)
    biases = () if bias is None else (bias,)
    function = epilogue if bias is None else add_bias if epilogue is None else BiasThen(epilogue)
    return Call(
        op="scaled_mm",
        a=a,
        b=tensor_of(b),
        packed=_packed(b),
        scale_a=scale_a,
        scale_b=scale_b,
        fast_accum=bool(fast_accum),
        out_dtype=out_dtype,
        out=out,
        epilogue=function,
        extra=(*biases, *epilogue_args),
        extra_names=("bias",) * len(biases),
    )


CALLS: dict[str, tuple[Callable[..., Call], tuple[str, ...]]] = {
    "mm": (product_call, ("mm",)),
    "addmm": (sum_call, ("addmm",)),
    "bmm": (product_call, ("bmm",)),
    "baddbmm": (sum_call, ("baddbmm",)),
    "mm_plus_mm": (mm_plus_mm_call, ()),
    "int_mm": (int_mm_call, ()),
    "int_mm_mul": (int_mm_mul_call, ()),
    "mixed_mm": (mixed_mm_call, ()),
    "scaled_mm": (scaled_mm_call, ()),
}
"""Operation to the function that makes its call, and the arguments that come before those of the caller."""


def _number(name: str, what: str, value: object) -> float:
    """A factor as a number: torch takes a tensor of one element too."""
    if isinstance(value, numbers.Real):
        return value  # type: ignore[return-value]
    single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and not value.requires_grad
    if not single:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InvalidProblemError(f"{name}: {what}: got {got}, expected a number, or a real tensor of one element without gradient")
    return value.item()  # type: ignore[attr-defined,no-any-return]


def _check_epilogue(name: str, epilogue: EpilogueFunction | None, epilogue_args: Sequence[Tensor]) -> None:
    if not isinstance(epilogue_args, (tuple, list)):
        got = type(epilogue_args).__name__
        raise InvalidProblemError(f"{name}: epilogue_args: got {got}, expected a tuple or list of tensors, such as (bias,)")
    if epilogue_args and epilogue is None:
        raise InvalidProblemError(f"{name}: got {len(epilogue_args)} epilogue_args without an epilogue, expected both or neither")


def _refuse_packed(name: str, b: object) -> None:
    if isinstance(b, PackedOperand):
        raise InvalidProblemError(f"{name}: b must be a torch.Tensor, got a prepacked operand; products without a batch take those")


def _check_dtype(name: str, what: str, dtype: object, legal: Sequence[torch.dtype]) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in legal:
        raise InvalidProblemError(f"{name}: {what}: got {dtype!r}, expected one of {', '.join(map(dtype_name, legal))}")
