"""Gradients of plain calls, by the rules of the operation's row and by the same operations."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import settings
from ..choice import Scalars
from ..device import made_current
from ..dispatch.arguments import Call
from ..dispatch.call import by_torch, torch_alone_has
from ..dispatch.keys import NOTHING
from ..dispatch.plan import Plan
from ..dispatch.prepack import PackedOperand
from ..dispatch.ready import plan_for
from ..problem import Problem
from ..problem.dtypes import accumulator_dtype
from ..problem.epilogue import evaluate
from ..problem.gradients import Product, epilogue_gradients, gradients, grouped_op, read_by
from ..problem.operation import Operation

Operate = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backward:
    """Products of a backward pass, which are differentiable again.

    ``operate`` runs the operation again, for the result before the epilogue. ``product`` is that of ``problem.gradients``.
    """

    operate: Operate
    product: Product

    @classmethod
    def strided(cls, operate: Operate) -> "Backward":
        """Return the products of strided operands by ``operate``."""
        return cls(operate=operate, product=functools.partial(_product, operate))


def _product(operate: Operate, a: torch.Tensor, b: torch.Tensor, *offs: torch.Tensor) -> torch.Tensor:
    """Multiply strided operands in a backward pass: by mm, bmm, or with offsets by a grouped product."""
    op = grouped_op(b) if offs else "bmm" if a.dim() == 3 else "mm"
    return operate(op, (a, b, *offs), None, None, NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Differentiable:
    """A plan that autograd follows."""

    plan: Plan
    row: Operation
    roles: tuple[str, ...]
    options: tuple[Any, ...]
    backward: Backward
    _kept: dict[tuple[bool, ...], tuple[int, ...]] = field(default_factory=dict)

    def new(self, tensors: Sequence[Any], scalars: Scalars) -> torch.Tensor:
        """Run into a new result, which has a gradient. A prepacked b is passed as such: its tensor gets the gradient."""
        a, b, *more = tensors
        packed = b if b.__class__ is PackedOperand else None
        given = tensors if packed is None else (a, packed.tensor, *more)
        result: torch.Tensor = _Following.apply(self, packed, scalars, *given)  # type: ignore[no-untyped-call]
        return result

    def kept(self, needs: tuple[bool, ...]) -> tuple[int, ...]:
        """Return the indices of the tensors that the backward pass reads for these gradients."""
        kept = self._kept.get(needs)
        if kept is None:
            reads = read_by(self.row.gradient or {}, (role for role, wants in zip(self.roles, needs, strict=False) if wants))
            all_of_them = self.plan.problem.epilogue is not None
            kept = tuple(i for i in range(len(needs)) if all_of_them or self.roles[i] in reads)
            self._kept[needs] = kept
        return kept


def differentiated(call: Call, problem: Problem, backward: Backward) -> tuple[torch.Tensor, Differentiable | None]:
    """Run a plain call whose gradient is wanted. Return the result, and the entry that runs it again (None if torch ran it)."""
    if problem.empty or torch_alone_has(call, problem):
        return by_torch(call), None
    with made_current(call.a.get_device()):
        entry = Differentiable(
            plan=plan_for(problem, call.a.get_device()),
            row=call.operation,
            roles=tuple(call.operands),
            options=tuple(call.options.values()),
            backward=backward,
        )
        operands: dict[str, Any] = call.operands if call.packed is None else {**call.operands, "b": call.packed}
        return entry.new((*operands.values(), *call.extra), call.scalars), entry


_FIRST_TENSOR = 3
"""Index of the first tensor among the arguments of ``_Following``."""


class _Following(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, entry: Differentiable, packed: PackedOperand | None, scalars: Scalars, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.entry, ctx.scalars, ctx.settings = entry, scalars, settings.patched.get()
        # Autograd refuses to save inference tensors. An operand of the epilogue may be one, so its copy is saved.
        kept = ((i, tensors[i]) for i in entry.kept(ctx.needs_input_grad[_FIRST_TENSOR:]))
        ctx.save_for_backward(*(x.clone() if i >= len(entry.roles) and x.is_inference() else x for i, x in kept))
        if packed is not None:
            tensors = (tensors[0], packed.for_choice(entry.plan.choice), *tensors[2:])
        return entry.plan.new(tensors, scalars)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with settings.use(ctx.settings):  # those of the forward pass, which autograd's threads do not have
            return _gradients(ctx, grads[0])


def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
    """Return a gradient for each argument of ``_Following.forward``."""
    entry, needs, problem = ctx.entry, ctx.needs_input_grad[_FIRST_TENSOR:], ctx.entry.plan.problem
    count = len(entry.roles)
    kept = ctx.saved_tensors  # read once: a checkpoint computes them again for each reading
    saved = dict(zip(entry.kept(needs), kept, strict=True))
    operands = {role: saved[i] for i, role in enumerate(entry.roles) if i in saved}
    of_extra: list[torch.Tensor | None] = [None] * (len(needs) - count)
    if (epilogue := problem.epilogue) is not None:  # the accumulator is computed again
        acc = entry.backward.operate(entry.row.name, tuple(operands.values()), None, None, NOTHING, ctx.scalars, entry.options)
        acc = acc.to(accumulator_dtype(operands["a"].dtype))
        grad, of_extra = epilogue_gradients(lambda acc, *x: evaluate(epilogue, acc, x), acc, kept[count:], needs[count:], grad)
    # A sparse weight has not the size of b. It is saved, since its own gradient reads it.
    shapes = {role: operands[role].shape if role in operands else getattr(problem, role).size for role in entry.roles}
    found = gradients(
        entry.row.gradient,
        grad.to(problem.a.dtype),
        operands,
        shapes,
        dict(zip((*entry.row.scalars, *entry.row.options), (*ctx.scalars, *entry.options), strict=True)),
        [role for role, wants in zip(entry.roles, needs, strict=False) if wants],
        entry.backward.product,
    )
    return (*[None] * _FIRST_TENSOR, *(found.get(role) for role in entry.roles), *of_extra)
