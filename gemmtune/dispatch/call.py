"""Path of a checked call without a plan, from its problem to its result."""

from __future__ import annotations

import torch

from ..problem import Problem
from .arguments import Call
from .checks import check_tensors, why_not_ours
from .fallback import attempted, by_torch, torch_alone_has
from .plan import Plan, new_output
from .ready import current_device, plan_for
from .statement import stated


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
    with current_device(call.a):
        plan = plan_for(problem, call.a.get_device())
        tensors = call.tensors_for(plan.choice)
        if call.out is None:
            return plan.new(tensors, call.scalars), plan
        return plan.into(call.out, tensors, call.scalars), plan
