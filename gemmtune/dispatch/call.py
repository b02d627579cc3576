"""Path of a checked call without a plan: describe it, make a plan, run it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from ..errors import GemmtuneError, InvalidProblemError
from ..problem import Problem
from .allocate import new_output
from .arguments import Call
from .checks import apart, check_operands, check_out, overlaps, why_not_ours
from .fallback import by_torch
from .plan import Plan
from .ready import plan_for
from .statement import epilogue_of, problem_of


def run_unchecked(call: Call) -> tuple[torch.Tensor, Plan | None]:
    """Check a call of an operator and ``run`` it. Torch does the call if no choice can read its tensors."""
    check_call(call)
    reason = why_not_ours([x for _, x in call.inputs], floats=call.operation.floats)
    return run(call) if reason is None else (attempted(by_torch, call, reason), None)


def run(call: Call) -> tuple[torch.Tensor, Plan | None]:
    """Run a checked call without a gradient. Return the result and its plan, which is None if torch computed it.

    Raises:
        InvalidProblemError: the operands do not fit together, or ``out`` cannot take the result.
        EpilogueError: the epilogue is no pointwise function.
    """
    bring_scalars(call)
    problem = problem_of(call, epilogue_of(call))
    if call.out is not None:
        prepare_out(call, problem)
    if problem.empty:
        return new_output(problem.out, call.a) if call.out is None else call.out, None
    if torch_alone_has(call, problem):
        return by_torch(call), None
    with current_device(call.a):
        plan = plan_for(problem, call.a.get_device())
        tensors = call.tensors_for(plan.choice)
        if call.out is None:
            return plan.new(tensors, call.scalars), plan
        return plan.into(call.out, tensors, call.scalars), plan


def torch_alone_has(call: Call, problem: Problem) -> bool:
    """Return True for a product without terms, or with NaN or infinity as a scalar, where the order of the steps shows."""
    return 0 in problem.summed or not all(map(math.isfinite, call.scalars))


def check_call(call: Call) -> None:
    """Raise InvalidProblemError unless all arguments are tensors on one device."""
    check_operands(call.name, [*call.inputs, *([("out", call.out)] if call.out is not None else [])])


def current_device(like: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the device of ``like`` is the current one."""
    index = like.get_device()
    elsewhere = index >= 0 and index != torch.cuda.current_device()
    return torch.cuda.device(index) if elsewhere else contextlib.nullcontext()


def attempted(do: Callable[[Call], torch.Tensor], call: Call, reason: str) -> torch.Tensor:
    """Do a call that ``reason`` leaves to torch. Raise InvalidProblemError where torch's error has neither call nor remedy."""
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


def no_gradient(name: str, argument: str) -> InvalidProblemError:
    """Return the error for an argument that requires a gradient of an operation without one."""
    return InvalidProblemError(
        f"{name}: {argument} requires grad, but the operation has no gradient; detach it, or use torch.no_grad()"
    )


def refuse_out(call: Call) -> None:
    """Raise InvalidProblemError for a differentiable call with out=."""
    if call.out is not None:
        raise InvalidProblemError(
            f"{call.name}: a call with out= is not differentiable, but an input requires grad; leave out out=, "
            "or use torch.no_grad()"
        )


def bring_scalars(call: Call) -> None:
    """Move 0-D tensors of another device to the device of a, as torch does."""
    device = call.a.device
    call.operands |= {role: x.to(device) for role, x in call.operands.items() if x.device != device}
    call.extra = tuple(x.to(device) for x in call.extra)


def prepare_out(call: Call, problem: Problem) -> None:
    """Check ``out``. If it overlaps the added operand, as torch allows, read that operand from a copy."""
    assert call.out is not None
    if call.out.requires_grad and torch.is_grad_enabled():
        raise InvalidProblemError(
            f"{call.name}: out requires grad, but a call with out= is not differentiable; detach it or leave out out="
        )
    inp = call.operands.get("inp")
    if inp is not None and overlaps(call.out, inp):
        call.operands["inp"] = apart(inp)
    others = [(name, x) for name, x in call.inputs if name != "inp"]
    check_out(call.name, call.out, problem.out.size, problem.out.dtype, call.a.device, others)


def cast_for_autocast(call: Call) -> None:
    """Cast the operands to the autocast dtype, as torch does. Block-sparse products keep theirs: torch casts no sparse tensor."""
    if call.operation.sparse:
        return
    kind = call.a.device.type
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    for operand in call.operation.operands:
        x = call.operands.get(operand.role)
        if x is None or x.dtype not in eligible or x.dtype == dtype:
            continue
        if not operand.scales:
            call.operands[operand.role] = x.to(dtype)
            call.packed = None if operand.role == "b" else call.packed
        elif operand.like_a:
            call.operands[operand.role] = x.float()
