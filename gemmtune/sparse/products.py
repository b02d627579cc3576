"""Products and linear layers with a block-sparse weight."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dispatch.arguments import transposed_operand
from ..dispatch.checks import check_extra, check_operands, check_out, no_gradient
from ..dispatch.keys import NOTHING
from ..dispatch.prepack import PackedOperand
from ..dispatch.scalars import number
from ..errors import InvalidProblemError
from ..ops.autograd import Backward
from ..ops.operate import in_python
from ..problem.dtypes import is_float8
from ..problem.fused import Then
from ..problem.operations import OPERATIONS
from ..problem.sparsity import Sparsity
from .batches import batched_product, is_batch
from .calls import operands_of, weight_of
from .factors import check_factors, check_integers, integer, scaling
from .gradients import count_use, transposed, weight_gradient
from .weights import sparsity_of

Tensor = torch.Tensor
EpilogueFunction = Callable[..., Tensor]


def bsr_mm(
    bsr: Tensor | PackedOperand,
    x: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(bsr @ x, *epilogue_args)

    Args:
        bsr: [M, K], a sparse_bsr tensor with blocks of any size, or ``prepack`` of one. Its dtype is float64, float32, float16,
            bfloat16, int8, float8_e4m3fn or float8_e5m2. Column indices of a block row must rise. They are read in the first call
            with the tensor, and again after a change that was made through it.
        x: [K, N], any strides, of the dtype of ``bsr``. Both may have leading batch dimensions, without an epilogue.
        out: [M, N] of the dtype of ``bsr`` (int32 for int8, bfloat16 for 8-bit floats). It has any strides without overlap, and
            shares no memory with the operands.
        epilogue: as for ``mm``. It gets float32 for int8.
        epilogue_args: tensors that broadcast to [M, N].

    Returns:
        [M, N], or ``out`` if it was given. NaN and infinity of ``x`` may be lost where a block does not exist. With the setting
        ``absent_blocks`` they must be. The dtype is the same under autocast, which casts no sparse tensors.

    Raises:
        InvalidProblemError: the operands do not fit together, or indices are out of range, unsorted or repeated.
        EpilogueError: the epilogue is no pointwise function of known parts.
    """
    return multiplied("bsr_mm", bsr, x, out=out, epilogue=epilogue, epilogue_args=epilogue_args)


def bsr_addmm(
    inp: Tensor,
    bsr: Tensor | PackedOperand,
    x: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    left_alpha: Tensor | None = None,
    right_alpha: Tensor | None = None,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """out = epilogue(beta · inp + left_alpha[:, None] · (alpha · bsr @ x) · right_alpha[None, :], *epilogue_args)

    ``left_alpha`` [M] and ``right_alpha`` [N] have a float dtype, and are ones by default. For 8-bit floats they are the scales of
    the rows of ``bsr`` and of the columns of ``x``. ``inp`` broadcasts to [M, N] and has the dtype of ``bsr``, which is no integer,
    or for 8-bit floats any wider one. Without the two factors, ``out`` may be ``inp`` itself. With ``beta`` zero, NaN and infinity
    in ``inp`` do not reach the result. With ``alpha`` zero, those in ``x`` do not, except for 8-bit floats. The rest is as for
    ``bsr_mm``.
    """
    name = "bsr_addmm"
    alpha, beta = number(name, "alpha", alpha), number(name, "beta", beta)
    weight = weight_of(name, bsr)
    plain = left_alpha is None and right_alpha is None
    if not plain:
        check_operands(name, [("bsr", weight), ("x", x)])
        check_factors(name, {"left_alpha": (left_alpha, weight.shape[-2]), "right_alpha": (right_alpha, x.shape[-1:].numel())})
    if not is_float8(weight.dtype):
        plain = plain or alpha == 0  # the product is zero, which no factor changes
    elif plain:
        plain, right_alpha = False, torch.ones((), device=x.device)
    if plain:
        return multiplied(name, bsr, x, inp, (alpha, beta), out=out, epilogue=epilogue, epilogue_args=epilogue_args)
    if beta != 0:
        check_operands(name, [("inp", inp)])
    factors = [f for f in (None if left_alpha is None else left_alpha.unsqueeze(-1), right_alpha) if f is not None]
    added = (inp,) if beta != 0 else ()
    combine = scaling(left_alpha is not None and right_alpha is not None, float(alpha), float(beta))
    function = combine if epilogue is None else Then(combine, epilogue, count=len(factors) + len(added))
    return multiplied("bsr_mm", bsr, x, out=out, epilogue=function, epilogue_args=(*factors, *added, *epilogue_args))


def int_bsr_addmm(
    inp: Tensor,
    bsr: Tensor | PackedOperand,
    x: Tensor,
    *,
    beta: int = 1,
    alpha: int = 1,
    left_alpha: Tensor | None = None,
    right_alpha: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out = beta · inp + left_alpha[:, None] · (alpha · bsr @ x) · right_alpha[None, :] of int8 ``bsr`` and ``x``, in int32.

    ``inp`` broadcasts to [M, N]. It, ``left_alpha`` [M] and ``right_alpha`` [N] are int32 or narrower integers. ``bsr_mm`` makes
    the product and torch does the rest, which is exact in the range of int32.

    Raises:
        InvalidProblemError: ``bsr`` is not int8, a factor is no integer, or ``bsr_mm`` refuses the operands.
    """
    name = "int_bsr_addmm"
    alpha, beta = integer(name, "alpha", alpha), integer(name, "beta", beta)
    weight = weight_of(name, bsr)
    if weight.dtype != torch.int8:
        raise InvalidProblemError(f"{name}: dtype of bsr: got {weight.dtype}, expected torch.int8; bsr_addmm takes floats")
    check_operands(name, [("bsr", weight), ("x", x), *([("inp", inp)] if beta != 0 else [])])
    factors = {"left_alpha": (left_alpha, weight.shape[-2]), "right_alpha": (right_alpha, x.shape[-1:].numel())}
    check_factors(name, factors, integers=True)
    result = multiplied("bsr_mm", bsr, x)
    if beta != 0:
        check_integers(name, "inp", inp)
        check_extra(name, [("inp", inp)], result.shape)
    if out is not None:
        check_out(name, out, result.shape, torch.int32, result.device, [])
    result = result if alpha == 1 else result * alpha
    result = result if left_alpha is None else result * left_alpha.to(torch.int32).unsqueeze(-1)
    result = result if right_alpha is None else result * right_alpha.to(torch.int32).unsqueeze(-2)
    if beta != 0:
        result = result.add(inp.to(torch.int32), alpha=beta)
    return result if out is None else out.copy_(result)


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
    follows = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if follows or torch._C._functorch.peek_interpreter_stack() is not None:
        result = multiplied(name, bsr, rows.t(), added, scalars).t().contiguous()
    else:
        dtype = OPERATIONS[name].result_dtype(weight.dtype, epilogue=False)
        result = x.new_empty((rows.shape[0], weight.shape[0]), dtype=dtype)
        multiplied(name, bsr, rows.t(), added, scalars, out=result.t())
    return result.reshape(*size[:-1], weight.shape[0])


def multiplied(
    name: str,
    bsr: Tensor | PackedOperand,
    x: Tensor,
    inp: Tensor | None = None,
    scalars: tuple[float, ...] = (),
    *,
    out: Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    epilogue_args: Sequence[Tensor] = NOTHING,
) -> Tensor:
    """Do a call of ``bsr_mm`` or ``bsr_addmm``. Dynamo, which does not trace sparse_bsr tensors, runs it untraced."""
    do = _outside_of_dynamo() if "torch._dynamo" in sys.modules else _multiplied
    return do(name, bsr, x, inp, scalars, out, epilogue, epilogue_args)


_outside: list[Callable[..., Tensor]] = []


def _outside_of_dynamo() -> Callable[..., Tensor]:
    """Return ``_multiplied`` for calls that Dynamo leaves untraced. A list keeps it: Dynamo warns of a cache of functools."""
    if not _outside:
        _outside.append(torch.compiler.disable(_multiplied))  # type: ignore[no-untyped-call]
    return _outside[0]


def _multiplied(
    name: str,
    bsr: Tensor | PackedOperand,
    x: Tensor,
    inp: Tensor | None,
    scalars: tuple[float, ...],
    out: Tensor | None,
    epilogue: EpilogueFunction | None,
    epilogue_args: Sequence[Tensor],
) -> Tensor:
    if is_batch(bsr, x):
        if epilogue is not None:
            raise InvalidProblemError(
                f"{name}: got an epilogue, left_alpha or right_alpha with a batch, expected matrices; apply them to the result"
            )
        result = batched_product(name, bsr, x, inp, lambda b, y, z: multiplied(name, b, y, z, scalars))
        if out is None:
            return result
        if result.requires_grad or (out.requires_grad and torch.is_grad_enabled()):
            raise InvalidProblemError(f"{name}: a call with out= is not differentiable; leave out out=, or use torch.no_grad()")
        check_out(name, out, result.shape, result.dtype, result.device, [])
        return out.copy_(result)
    operands, sparsity = operands_of(name, bsr, x, inp, out, epilogue, epilogue_args)
    count_use(weight_of(name, bsr))
    extra = tuple(map(transposed_operand, epilogue_args))
    result = transposed_product(name, operands, None if out is None else out.t(), epilogue, extra, scalars, (sparsity,))
    return result.t() if out is None else out


def transposed_product(
    name: str,
    operands: tuple[Any, ...],
    out: Tensor | None,
    epilogue: EpilogueFunction | None,
    epilogue_args: Sequence[Tensor],
    scalars: tuple[float, ...] = (),
    options: tuple[Sparsity, ...] = (),
) -> Tensor:
    """Do a call that is stated as its transpose, with the products of this module in its backward pass."""
    return in_python(False, name, out, epilogue, epilogue_args, scalars, options, None, None, *operands, backward=BACKWARD)


def _product(a: Tensor, b: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a @ b for a block-sparse b, or a @ b at the blocks of ``like``. Raises InvalidProblemError for 8-bit floats."""
    if is_float8(b.dtype):
        raise no_gradient("bsr_mm", "x" if like is None else "bsr")
    if like is not None:
        return weight_gradient(like, a, b.mT)
    weight = transposed(b)
    return transposed_product("bsr_mm", (a, weight), None, None, NOTHING, (), (sparsity_of("bsr_mm", weight),))


BACKWARD = Backward(operate=transposed_product, product=_product)
"""Products of the backward pass of a call with a block-sparse weight."""
