"""The path of every public operation, from its arguments to a launch.

A call looks for a plan under a key that it can read off the operands in about a microsecond; everything else (checks, gradients,
tuning) is for calls that have no plan yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..dispatch.call import composed, run
from ..dispatch.calls import call_of
from ..dispatch.fallback import by_torch
from ..dispatch.fused import NAMES
from ..dispatch.keys import NOTHING, key_of
from ..dispatch.plan import keep_ready, ready
from ..dispatch.prepack import PackedOperand
from ..errors import InvalidProblemError
from ..problem.fields import scalar_class
from .autograd import differentiable

__all__ = ["operate"]

Tensor = torch.Tensor
_NUMBERS = (int, float)
is_compiling = torch.compiler.is_compiling


def operate(
    name: str,
    operands: tuple[Any, ...],
    out: Tensor | None,
    epilogue: Callable[..., Tensor] | None,
    epilogue_args: Sequence[Tensor],
    scalars: tuple[Any, ...] = (),
    options: tuple[Hashable, ...] = (),
    brought: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Do a call of the public function ``name``.

    ``operands`` are in the row's order, optional ones at the end left out if they are None. ``brought`` is the argument that
    becomes the first operand of the epilogue (``dispatch.fused``).
    """
    key = None
    if out is None and epilogue is None and epilogue_args is NOTHING and not is_compiling():
        given = operands if brought is None else (*operands, brought)
        if not scalars:
            key = key_of(name, given, options if out_dtype is None else (options, out_dtype))
        elif scalars[0].__class__ in _NUMBERS and scalars[1].__class__ in _NUMBERS:
            key = key_of(name, given, (scalar_class(scalars[0]), scalar_class(scalars[1])))
        if key is not None and (plan := ready.get(key)) is not None:
            b = given[1]
            if b.__class__ is PackedOperand:
                given = (given[0], b.for_choice(plan.choice), *given[2:])
            return plan.new(given, scalars)
    return _planned(
        key, name, operands, scalars=scalars, options=options, brought=brought, out_dtype=out_dtype, out=out, epilogue=epilogue,
        epilogue_args=epilogue_args,
    )  # fmt: skip


def _planned(key: Hashable | None, name: str, operands: tuple[Any, ...], **arguments: Any) -> Tensor:
    row = NAMES[name]
    roles = (operand.role for operand in row.operands)
    call = call_of(name, dict(zip(roles, operands, strict=False)), **arguments)
    if is_compiling():
        # Inside torch.compile these are torch's operations, which its compiler knows.
        return by_torch(call)
    wanting = call.wants_grad
    if wanting and row.gradient is None:
        raise InvalidProblemError(
            f"{name}: {wanting[0]} requires grad, but the operation has no gradient; detach it, or use torch.no_grad()"
        )
    if wanting and row.gradient == "composed":
        return composed(call)
    if wanting and all(isinstance(x, Tensor) for _, x in call.inputs):
        return differentiable(call)
    result, plan = run(call)
    if key is not None and plan is not None:
        keep_ready(key, plan)
    return result
