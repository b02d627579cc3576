"""Path of a checked call without a plan, from its problem to its result."""

import math
from collections.abc import Callable, Sequence

import torch

from ..device import made_current
from ..errors import GemmtuneError, InvalidProblemError, NoValidChoicesError
from ..problem import Problem
from ..settings import given
from .arguments import Call
from .checks import check_tensors, why_not_ours
from .plan import Plan, new_output
from .ready import plan_for
from .statement import check_composed, stated


def attempted(do: Callable[[Call], torch.Tensor], call: Call, reason: str) -> torch.Tensor:
    """Do a call that ``reason`` leaves to torch. Raise InvalidProblemError where torch's error has neither call nor remedy.

    Raises NoValidChoicesError if the bits of a row must not depend on its batch: those of torch's sums do.
    """
    inputs = [x for _, x in call.inputs]
    rounded = any(x.is_floating_point() or x.is_complex() for x in inputs)
    known = all(type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in inputs)
    if do is by_torch and rounded and known and given().batch_invariant:
        remedy = "Give dense tensors of a dtype that has tables, or leave batch_invariant out."
        raise NoValidChoicesError(
            f"{call.name}, batch-invariant", [("every choice", "refused", f"torch has to do it: {reason}")], remedy
        )
    if do is by_torch:
        check_composed(call)
    try:
        return do(call)
    except (RuntimeError, AssertionError) as error:
        # FakeTensors outside of their mode are an AssertionError of torch.
        dense = all(x.layout == torch.strided for _, x in call.inputs)
        if isinstance(error, GemmtuneError) or (dense and not isinstance(error, AssertionError)):
            raise
        raise InvalidProblemError(
            f"{call.name}: torch has to do it, because {reason}, and refuses: {str(error).splitlines()[0]}; give dense tensors, "
            "and fake ones only inside of their mode"
        ) from error


def torch_alone_has(call: Call, problem: Problem) -> bool:
    """Return True for a product without terms, or with NaN or infinity as a scalar, where the order of the steps shows."""
    return 0 in problem.summed or not all(map(math.isfinite, call.scalars))


def by_torch(call: Call) -> torch.Tensor:
    """Compute the composition, then the epilogue, differentiable as torch is. Raises InvalidProblemError if parts do not fit."""
    operands = [call.operands.get(operand.role) for operand in call.operation.operands]
    result = call.operation.compose(*operands, *call.scalars, **call.options)
    return finished(call, result, call.epilogue, call.extra)


def finished(
    call: Call, result: torch.Tensor, epilogue: Callable[..., torch.Tensor] | None, extra: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Finish a call with the ``result`` of its product: apply ``epilogue``, cast, and copy into ``out``."""
    row = call.operation
    if epilogue is not None and row.fused is not None and row.fused.default is not None:
        result = result.to(row.fused.default)
    dtype = call.out_dtype or row.result_of(epilogue=call.epilogue is not None).default
    if epilogue is not None:
        # A product of integers that only torch has becomes what the function makes of it.
        kept = result.dtype if result.is_floating_point() else None
        dtype = _cast_at_the_end(epilogue, result, extra) or dtype or kept
        size = result.shape
        result = epilogue(result, *extra)
        if result.shape != size:
            raise InvalidProblemError(
                f"{call.name}: epilogue: got a result of shape {list(result.shape)}, expected {list(size)}, that of the product; "
                "give operands that broadcast to it"
            )
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
    """Return the dtype to which the function casts at its end, or None if its result follows its argument's dtype."""
    # No block without gradients: torch.export could not save a graph with one.
    ones = [x.detach().new_ones([1] * x.dim()) for x in extra]
    narrow, wide = (epilogue(acc.detach().new_ones((1, 1), dtype=dtype), *ones) for dtype in (torch.float16, torch.float64))
    return narrow.dtype if narrow.dtype == wide.dtype else None


def run_unchecked(call: Call) -> tuple[torch.Tensor, Plan | None]:
    """Check a call of an operator and ``run`` it. Torch does the call if no choice can read its tensors."""
    check_tensors(call)
    reason = why_not_ours([x for _, x in call.inputs], floats=call.operation.floats)
    return run(call, stated(call)) if reason is None else (attempted(by_torch, call, reason), None)


def run(call: Call, problem: Problem) -> tuple[torch.Tensor, Plan | None]:
    """Run a checked and stated call without a gradient. Return the result and its plan, which is None if torch computed it."""
    if problem.empty:
        return new_output(problem.out, call.a) if call.out is None else call.out, None
    if torch_alone_has(call, problem):
        return by_torch(call), None
    with made_current(call.a.get_device()):
        plan = plan_for(problem, call.a.get_device())
        tensors = call.tensors_for(plan.choice)
        if call.out is None:
            return plan.new(tensors, call.scalars), plan
        return plan.into(call.out, tensors, call.scalars), plan
