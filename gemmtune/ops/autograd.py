"""Gradients of plain calls whose row has rules for them, through the same operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..choice import Scalars, Tensors
from ..dispatch.arguments import Call
from ..dispatch.call import bring_scalars, current_device
from ..dispatch.fallback import by_torch
from ..dispatch.keys import NOTHING
from ..dispatch.plan import Plan
from ..dispatch.prepack import PackedOperand
from ..dispatch.ready import plan_for
from ..dispatch.statement import epilogue_of, problem_of
from ..problem.dtypes import accumulator_dtype
from ..problem.epilogue import evaluate
from ..problem.gradients import epilogue_gradients, gradients, grouped_op, read_by
from ..problem.operation import Operation

Operate = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Differentiable:
    """A plan that autograd follows. ``operate`` is what its backward pass does products with, which are differentiable again."""

    plan: Plan
    row: Operation
    roles: tuple[str, ...]
    options: tuple[Any, ...]
    operate: Operate
    packed: PackedOperand | None = None
    _kept: dict[tuple[bool, ...], tuple[int, ...]] = field(default_factory=dict)

    def new(self, tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        """Run into a result of its own, which has a gradient."""
        result: torch.Tensor = _Following.apply(self, scalars, *tensors)  # type: ignore[no-untyped-call]
        return result

    def kept(self, needs: tuple[bool, ...]) -> tuple[int, ...]:
        """Which tensors the backward pass reads, if it is asked for these gradients."""
        kept = self._kept.get(needs)
        if kept is None:
            reads = read_by(self.row.gradient or {}, (role for role, wants in zip(self.roles, needs, strict=False) if wants))
            all_of_them = self.plan.problem.epilogue is not None
            kept = tuple(i for i in range(len(needs)) if all_of_them or self.roles[i] in reads)
            self._kept[needs] = kept
        return kept


def differentiated(call: Call, operate: Operate) -> tuple[torch.Tensor, Differentiable | None]:
    """Do a plain call of which a gradient is wanted. Returns the result, and what does so again (None if torch had to)."""
    bring_scalars(call)
    problem = problem_of(call, epilogue_of(call))
    if problem.empty or 0 in problem.summed:
        return by_torch(call), None
    with current_device(call.a):
        entry = Differentiable(
            plan=plan_for(problem, call.a.get_device()),
            row=call.operation,
            roles=tuple(call.operands),
            options=tuple(call.options.values()),
            operate=operate,
            packed=call.packed,
        )
        return entry.new((*call.operands.values(), *call.extra), call.scalars), entry


class _Following(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entry: Differentiable, scalars: Scalars, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.entry, ctx.scalars = entry, scalars
        ctx.save_for_backward(*(tensors[i] for i in entry.kept(ctx.needs_input_grad[2:])))
        if entry.packed is not None:
            tensors = (tensors[0], entry.packed.for_choice(entry.plan.choice), *tensors[2:])
        return entry.plan.new(tensors, scalars)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        entry, needs, problem = ctx.entry, ctx.needs_input_grad[2:], ctx.entry.plan.problem
        count = len(entry.roles)
        kept = ctx.saved_tensors  # read once: a checkpoint computes them again for each reading
        saved = dict(zip(entry.kept(needs), kept, strict=True))
        operands = {role: saved[i] for i, role in enumerate(entry.roles) if i in saved}
        grad: torch.Tensor = grads[0]
        of_extra: list[torch.Tensor | None] = [None] * (len(needs) - count)
        if problem.epilogue is not None:
            grad, of_extra = through_epilogue(entry, ctx.scalars, operands, kept[count:], needs[count:], grad)

        def product(a: torch.Tensor, b: torch.Tensor, *offs: torch.Tensor) -> torch.Tensor:
            op = grouped_op(b) if offs else "bmm" if a.dim() == 3 else "mm"
            result: torch.Tensor = entry.operate(op, (a, b, *offs), None, None, NOTHING)
            return result

        found = gradients(
            entry.row.gradient,
            grad.to(problem.a.dtype),
            operands,
            {role: getattr(problem, role).size for role in entry.roles},
            dict(zip((*entry.row.scalars, *entry.row.options), (*ctx.scalars, *entry.options), strict=True)),
            [role for role, wants in zip(entry.roles, needs, strict=False) if wants],
            product,
        )
        return (None, None, *(found.get(role) for role in entry.roles), *of_extra)


def through_epilogue(
    entry: Differentiable,
    scalars: Scalars,
    operands: dict[str, torch.Tensor],
    extra: Tensors,
    wants: tuple[bool, ...],
    grad: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the gradient of the accumulator, which is computed again, and of each extra operand that ``wants`` one."""
    epilogue = entry.plan.problem.epilogue
    assert epilogue is not None
    acc = entry.operate(entry.row.name, tuple(operands.values()), None, None, NOTHING, scalars, entry.options)
    acc = acc.to(accumulator_dtype(operands["a"].dtype))
    return epilogue_gradients(lambda acc, *extra: evaluate(epilogue, acc, extra), acc, extra, wants, grad)
