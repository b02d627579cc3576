"""The path of a call that has no plan at hand: check, describe, differentiate, plan, run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import InvalidProblemError
from ..problem import Epilogue, Layout, Problem, precision_of
from ..problem.dtypes import accumulator_dtype
from ..problem.problem import Op, scalar_class
from .allocate import new_output
from .checks import check_operands, check_out, overlaps, why_not_ours
from .epilogues import traced
from .fallback import torch_call
from .plan import Plan, plan_for
from .prepack import PackedOperand

__all__ = ["Call", "problem_of", "run"]

log = logging.getLogger("gemmtune")

EpilogueFunction = Callable[..., torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of one call of an operation, as the caller gave them."""

    op: Op
    a: torch.Tensor
    b: torch.Tensor
    packed: PackedOperand | None = None
    inp: torch.Tensor | None = None
    alpha: float = 1
    beta: float = 0
    out: torch.Tensor | None = None
    epilogue: EpilogueFunction | None = None
    extra: tuple[torch.Tensor, ...] = ()

    @property
    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor that is read, by the name of its argument."""
        named = [("a", self.a), ("b", self.b), *([("inp", self.inp)] if self.inp is not None else [])]
        return named + [(f"epilogue_args[{i}]", x) for i, x in enumerate(self.extra)]

    @property
    def needs_grad(self) -> bool:
        """The result has to be differentiable."""
        return torch.is_grad_enabled() and any(x.requires_grad for _, x in self.inputs)

    def by_torch(self) -> torch.Tensor:
        """The call as torch does it."""
        return torch_call(self.op, self.a, self.b, self.inp, self.alpha, self.beta, self.out, self.epilogue, self.extra)


def run(call: Call) -> tuple[torch.Tensor, Plan | None]:
    """Do a call that needs no gradient. Returns the result, and the plan that made it (None if torch had to).

    Raises:
        InvalidProblemError: the operands do not fit together, or ``out`` cannot take the result.
        EpilogueError: the epilogue is no pointwise function.
    """
    check_operands(call.op, [*call.inputs, *([("out", call.out)] if call.out is not None else [])])
    reason = why_not_ours([x for _, x in call.inputs])
    if reason is not None:
        log.debug("%s runs by torch: %s", call.op, reason)
        return call.by_torch(), None
    cast_for_autocast(call)
    call.inp = call.inp.to(call.a.device) if call.inp is not None else None
    call.extra = tuple(x.to(call.a.device) for x in call.extra)
    epilogue = traced(call.epilogue, accumulator_dtype(call.a.dtype), call.extra) if call.epilogue else None
    problem = problem_of(call, epilogue)
    if call.out is not None:
        prepare_out(call, problem)
    if problem.empty:
        return new_output(problem.out, call.a) if call.out is None else call.out, None
    if problem.k == 0:
        return call.by_torch(), None
    index = call.a.get_device()
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return execute(call, problem, index)
    return execute(call, problem, index)


def execute(call: Call, problem: Problem, index: int) -> tuple[torch.Tensor, Plan]:
    """Run the plan of a problem on the current device."""
    plan = plan_for(problem, index)
    b = call.packed.for_choice(plan.choice) if call.packed is not None else call.b
    if call.out is None:
        return plan.new(call.a, b, call.inp, call.alpha, call.beta, call.extra), plan
    plan.kernel.run(call.out, call.a, b, call.inp, call.alpha, call.beta, call.extra)
    return call.out, plan


def problem_of(call: Call, epilogue: Epilogue | None) -> Problem:
    """The Problem that a call states. Raises InvalidProblemError if the operands do not fit together."""
    rank = 3 if call.op in ("bmm", "baddbmm") else 2
    for name, x in (("a", call.a), ("b", call.b)):
        if x.dim() != rank:
            raise InvalidProblemError(f"{call.op}: {name} must be a {rank}-D tensor, got shape {list(x.shape)}")
    dtype = (epilogue.result_dtype if epilogue else None) or call.a.dtype
    size = (*call.a.shape[:-1], call.b.shape[-1])
    fits = call.out is not None and tuple(call.out.shape) == size and call.out.dtype == dtype
    out = Layout.of(call.out) if call.out is not None and fits else Layout.contiguous(size, dtype)
    return Problem(
        op=call.op,
        a=Layout.of(call.a),
        b=Layout.of(call.b),
        out=out,
        inp=Layout.of(call.inp) if call.inp is not None else None,
        alpha=scalar_class(call.alpha),
        beta=scalar_class(call.beta) if call.inp is not None else "zero",
        epilogue=epilogue,
        device_type=call.a.device.type,
        precision=precision_of(call.a.dtype, call.a.device.type),
        prepacked=call.packed is not None,
    )


def prepare_out(call: Call, problem: Problem) -> None:
    """Check ``out``; where it is the added operand itself, as torch allows, read that from a copy."""
    assert call.out is not None
    if call.out.requires_grad and torch.is_grad_enabled():
        raise InvalidProblemError(
            f"{call.op}: out requires grad, but a call with out= is not differentiable; detach it or leave out out="
        )
    read = call.inputs
    if call.inp is not None and overlaps(call.out, call.inp):
        call.inp = call.inp.clone(memory_format=torch.preserve_format)
        read = [(name, x) for name, x in read if name != "inp"]
    check_out(call.op, call.out, problem.out.size, problem.out.dtype, call.a.device, read)


def cast_for_autocast(call: Call) -> None:
    """Under autocast, torch runs these operations in the autocast dtype: so do we."""
    kind = call.a.device.type
    if not torch.is_autocast_enabled(kind):
        return
    dtype = torch.get_autocast_dtype(kind)
    eligible: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)
    call.packed = call.packed if call.b.dtype == dtype else None
    call.a = call.a.to(dtype) if call.a.dtype in eligible else call.a
    call.b = call.b.to(dtype) if call.b.dtype in eligible else call.b
    if call.inp is not None and call.inp.dtype in eligible:
        call.inp = call.inp.to(dtype)
