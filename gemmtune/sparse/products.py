"""Products with a block-sparse weight.

bsr [M, K] @ x [K, N] is stated as its transpose, a @ b with a = xᵀ and b = bsrᵀ, as ``nn.Linear`` has it: the weight is what may be
prepacked, and its blocks are rows and columns of b.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dispatch.arguments import Call, transposed_operand
from ..dispatch.call import attempted, bring_scalars, prepare_out, refuse_out, run_planned
from ..dispatch.calls import number
from ..dispatch.checks import check_extra, check_operands, check_out, watched, why_not_ours
from ..dispatch.fallback import by_torch
from ..dispatch.keys import NOTHING, key_of
from ..dispatch.noting import noted
from ..dispatch.plan import Plan
from ..dispatch.prepack import PackedOperand
from ..dispatch.ready import keep_ready, ready
from ..dispatch.statement import epilogue_of
from ..errors import InvalidProblemError
from ..problem.dtypes import is_float8
from ..problem.fields import scalar_class
from ..problem.fused import Then
from .batches import batched_product, is_batch
from .calls import bound_block_call, problem_of_blocks, read_beside_inp
from .factors import check_factors, check_integers, integer, scaling
from .gradients import BlockProduct
from .weights import sparsity_of

Tensor = torch.Tensor
B_PLACE = 2
"""The place of b among ``Plan.spans``, behind out and a."""
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
        bsr: [M, K], a sparse_bsr tensor with blocks of any size, or ``prepack`` of one: of float64, float32, float16, bfloat16,
            int8, float8_e4m3fn or float8_e5m2. Column indices of a block row must rise. They are read when the tensor is first
            seen, and again after a change that was made through it.
        x: [K, N], any strides, of the dtype of ``bsr``. Both may have a batch in front, without an epilogue.
        out: [M, N] of the dtype of ``bsr`` (int32 for int8, bfloat16 for 8-bit floats), any strides without overlap, sharing no
            memory with what is read.
        epilogue: as for ``mm``; it gets float32 for int8.
        epilogue_args: tensors that broadcast to [M, N].

    Returns:
        [M, N]; ``out`` if it was given. Where a block does not exist, NaN and infinity of ``x`` need not show, unless the setting
        ``absent_blocks`` says that they must not. It has that dtype under autocast too, which casts no sparse tensors.

    Raises:
        InvalidProblemError: operands that do not fit together, or indices out of range, unsorted or repeated.
        EpilogueError: an epilogue that is not a pointwise function of known parts.
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

    ``left_alpha`` [M] and ``right_alpha`` [N] are of a float dtype, and ones where they are None: of 8-bit floats the scales of the
    rows of ``bsr`` and of the columns of ``x``. ``inp`` broadcasts to [M, N] and has the dtype of ``bsr``, which is no integer, or
    beside 8-bit floats any wider one; without those two, ``out`` may be ``inp`` itself. With ``beta`` zero, NaN and infinity in
    ``inp`` do not reach the result, with ``alpha`` zero those in ``x`` do not, but of 8-bit floats. The rest is as for ``bsr_mm``.
    """
    name = "bsr_addmm"
    alpha, beta = number(name, "alpha", alpha), number(name, "beta", beta)
    weight = weight_of(name, bsr)
    plain = left_alpha is None and right_alpha is None
    if not plain:
        check_operands(name, [("bsr", weight), ("x", x)])
        check_factors(name, {"left_alpha": (left_alpha, weight.shape[-2]), "right_alpha": (right_alpha, x.shape[-1:].numel())})
    if not is_float8(weight.dtype):
        plain = plain or alpha == 0  # then nothing of the product is left that factors would scale
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

    ``inp`` broadcasts to [M, N] and is int32, as are ``left_alpha`` [M] and ``right_alpha`` [N], or narrower integers.
    The product is that of ``bsr_mm``; what comes after it is torch's, exact as far as int32 goes.

    Raises:
        InvalidProblemError: another dtype than int8, factors that are no integers, or what ``bsr_mm`` refuses.
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


def weight_of(name: str, bsr: object) -> Tensor:
    """The weight of a call, prepacked or not."""
    weight = bsr.tensor if isinstance(bsr, PackedOperand) else bsr
    if not isinstance(weight, Tensor):
        sparsity_of(name, weight)  # which says what is expected
    return weight  # type: ignore[return-value]


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
    """Do a call of ``bsr_mm`` or ``bsr_addmm``. Dynamo, which knows no sparse_bsr tensors, runs it as it is."""
    do = _outside_of_dynamo() if "torch._dynamo" in sys.modules else _multiplied
    return do(name, bsr, x, inp, scalars, out, epilogue, epilogue_args)


_outside: list[Callable[..., Tensor]] = []


def _outside_of_dynamo() -> Callable[..., Tensor]:
    """``_multiplied``, left alone by Dynamo; kept in a list, since Dynamo warns of a cache of functools."""
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
    weight = bsr.tensor if isinstance(bsr, PackedOperand) else bsr
    if is_batch(weight, x):
        if epilogue is not None:
            raise InvalidProblemError(
                f"{name}: got an epilogue, left_alpha or right_alpha with a batch, expected matrices; apply them to the result"
            )
        return _of_batches(name, bsr, x, inp, scalars, out)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (weight, x, inp, *epilogue_args)):
        refuse_out(bound_block_call(name, bsr, x, inp, scalars=scalars, out=out, epilogue=epilogue, epilogue_args=epilogue_args))
        whole = functools.partial(multiplied, name, bsr, x, inp, scalars, epilogue=epilogue, epilogue_args=epilogue_args)
        before = functools.partial(multiplied, name, scalars=scalars)
        return BlockProduct.apply(  # type: ignore[no-untyped-call,no-any-return]
            whole, functools.partial(multiplied, "bsr_mm"), before, tuple(scalars), epilogue, weight, x, inp, *epilogue_args
        )
    key = None
    fits = out is None or (isinstance(out, Tensor) and out.dim() == 2)
    if fits and epilogue is None and isinstance(x, Tensor) and x.dim() == 2 and not epilogue_args:
        sparsity = sparsity_of(name, weight)
        given: tuple[Any, ...] = (x.t(), weight.values(), *(() if inp is None else (transposed_operand(inp),)))
        asked = (sparsity, weight.shape, weight is not bsr, out is None, *map(scalar_class, scalars))
        into = None if out is None else out.t()
        key = None if watched((x,)) else key_of(name, given if into is None else (*given, into), asked)
        if key is not None and (entry := ready.get(key)) is not None:
            b = bsr.for_choice(entry.plan.choice) if isinstance(bsr, PackedOperand) else weight
            if out is None or into is None:
                return entry.new((given[0], b, *given[2:]), scalars).t()
            if _is_apart(entry.plan, into, given, weight):
                entry.plan.into(into, (given[0], b, *given[2:]), scalars)
                return out
    call = bound_block_call(name, bsr, x, inp, scalars=scalars, out=out, epilogue=epilogue, epilogue_args=epilogue_args)
    done = _run(key, call)
    return done.t() if out is None else out


def _is_apart(plan: Plan, out: Tensor, given: tuple[Any, ...], weight: Tensor) -> bool:
    """``Plan.apart``, where b has the memory of the blocks that exist, and of their indices, not that of a matrix."""
    first = out.data_ptr()
    end = first + plan.spans[0]
    for i, x in enumerate(given, 1):
        address = x.data_ptr()
        if address < end and first < address + (plan.spans[i] if i != B_PLACE else x.nbytes):
            return False
    for x in (weight.crow_indices(), weight.col_indices()):
        address = x.data_ptr()
        if address < end and first < address + x.nbytes:
            return False
    return True


def _of_batches(
    name: str, bsr: Tensor | PackedOperand, x: Tensor, inp: Tensor | None, scalars: tuple[float, ...], out: Tensor | None
) -> Tensor:
    """Do a call with a batch of weights or of matrices."""
    result = batched_product(name, bsr, x, inp, lambda b, y, z: multiplied(name, b, y, z, scalars))
    if out is None:
        return result
    if result.requires_grad or (out.requires_grad and torch.is_grad_enabled()):
        raise InvalidProblemError(f"{name}: a call with out= is not differentiable; leave out out=, or use torch.no_grad()")
    check_out(name, out, result.shape, result.dtype, result.device, [])
    return out.copy_(result)


def _run(key: Any, call: Call) -> Tensor:
    """Do a call without a plan at hand; the result is the transpose of the caller's."""
    strided = [x for name, x in call.inputs if name != "b"]
    reason = why_not_ours(strided, floats=False)
    if reason is not None:
        return attempted(by_torch, call, reason)
    kind = call.a.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # what is sparse keeps its dtype, and torch has no product of other ones
            return _run(key, call)
    bring_scalars(call)
    problem = problem_of_blocks(call, epilogue_of(call))
    if call.out is not None:
        prepare_out(call, problem, read_beside_inp(call))
    with noted(lambda: problem):
        result, plan = run_planned(call, problem)
    keep_ready(key, plan)
    return result
