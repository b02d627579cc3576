"""Products by stored picks outside of compiled graphs, with gradients. torch runs them under modes, transforms and autocast."""

from collections.abc import Hashable

import torch
from torch.autograd import forward_ad

from ..operators.torch_products import BY_NAME
from ..ops.autograd import Backward, Differentiable
from ..problem.operations import DENSE_OPS, OPERATIONS
from ..problem.precision import flags_token
from .picks import Pick, pick_for

Tensor = torch.Tensor
GRADIENT_US = 50.0
"""Host time of an autograd function in Python, backward pass included. A pick must save more."""
_TORCH = {op: BY_NAME[f"aten::{op}"].functions[0] for op in DENSE_OPS}
"""torch's functions for the dense operations, which have gradients here."""


def plain_here() -> bool:
    """Return True if only torch's kernels would see a call: no mode, transform, autocast or tracer is active."""
    return (
        not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._is_any_autocast_enabled()
        and forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


class Bound:
    """A pick for operands with certain shapes, strides and alignment. ``fits`` checks further operands in about a microsecond."""

    __slots__ = ("_alike", "_device", "_flags", "pick")

    def __init__(self, pick: Pick, tensors: tuple[Tensor, ...]) -> None:
        self.pick = pick
        self._alike = tuple(map(_kind, tensors))
        self._device = tensors[0].get_device()
        self._flags = self._flags_now(tensors[0].dtype)

    @property
    def elsewhere(self) -> bool:
        """True if the pick is for another GPU than the current one. torch runs there."""
        return self._device >= 0 and self._device != torch._C._cuda_getDevice()

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return True if the operands have the problem's layouts, on the current device and under the same precision flags."""
        return not self.elsewhere and self._alike == tuple(map(_kind, tensors)) and self._flags == self._flags_now(tensors[0].dtype)

    def _flags_now(self, dtype: torch.dtype) -> object:
        return flags_token(dtype) if self._device >= 0 else None

    def run(self, op: str, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the result, differentiable if an operand requires a gradient, or None for torch. Needs ``plain_here()``."""
        if not self.pick.serves_now or not self.fits(tensors):
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            if self.pick.saves_us < GRADIENT_US or op not in _TORCH:
                return None
            row = OPERATIONS[op]
            roles = tuple(operand.role for operand in row.operands)
            followed = Differentiable(plan=self.pick.plan, row=row, roles=roles, options=(), backward=_BACKWARD)
            return followed.new(tensors, scalars_of(op))
        return self.pick.plan.new(tensors, scalars_of(op))


def bound_for(op: str, tensors: tuple[Tensor, ...], options: tuple[Hashable, ...] = ()) -> Bound | None:
    """Return the stored pick for operands (a, b), or (a, b, inp) with alpha = beta = 1, or None for torch."""
    pick = pick_for(op, tensors, scalars_of(op), options)
    return None if pick is None else Bound(pick, tensors)


def multiplied(op: str, *tensors: Tensor) -> Tensor:
    """Return the product by the stored pick, or by torch."""
    # Compiled autograd traces this, and the look-up of a pick is no part of a graph.
    picks = plain_here() and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    bound = bound_for(op, tensors) if picks else None
    result = bound.run(op, tensors) if bound is not None else None
    if result is not None:
        return result
    a, b, *inp = tensors
    return _TORCH[op](*inp, a, b)


def _kind(x: Tensor) -> tuple[object, ...]:
    """Return the properties that a pick needs. No pick fits a tensor without memory, such as one of the meta device."""
    address = x.data_ptr()
    return (x.__class__, x.shape, x.stride(), x.dtype, x.get_device(), address & 15 if address else None, x.is_neg())


def scalars_of(op: str) -> tuple[float, ...]:
    """Return the scalars of an operation in a model, which are 1."""
    return (1,) * len(OPERATIONS[op].scalars)


_BACKWARD = Backward.strided(lambda op, tensors, *_: multiplied(op, *tensors))
"""Products of a backward pass, by stored picks. Their own gradients are torch's."""
