"""From the arguments of a call to the Problem that they state."""

from __future__ import annotations

import torch

from ..errors import InvalidProblemError
from ..problem import Epilogue, Layout, Problem, precision_of
from ..problem.dtypes import accumulator_dtype
from ..problem.operations import Op
from ..problem.problem import scalar_class
from .arguments import Call
from .checks import check_extra
from .epilogues import traced

__all__ = ["epilogue_of", "problem_of"]


def epilogue_of(call: Call) -> Epilogue | None:
    """The graph of the call's epilogue. Raises EpilogueError if it has none."""
    return traced(call.epilogue, epilogue_dtype(call.a.dtype), call.extra) if call.epilogue else None


def epilogue_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what an epilogue gets after a product of ``dtype`` (see ``Problem.epilogue_dtype``)."""
    accumulator = accumulator_dtype(dtype)
    return torch.float32 if accumulator == torch.int32 else accumulator


def problem_of(call: Call, epilogue: Epilogue | None) -> Problem:
    """The Problem that a call states. Raises InvalidProblemError if the operands do not fit together."""
    rank = 3 if call.op in ("bmm", "baddbmm") else 2
    for name, x in (("a", call.a), ("b", call.b), ("c", call.c), ("d", call.d)):
        if x is not None and x.dim() != rank:
            raise InvalidProblemError(f"{call.name}: {name} must be a {rank}-D tensor, got shape {list(x.shape)}")
    dtype = (epilogue.result_dtype if epilogue else None) or call.out_dtype or result_dtype(call.op, call.a.dtype, epilogue)
    size = (*call.a.shape[:-1], call.b.shape[-1])
    check_extra(call.name, zip(call.extra_names, call.extra, strict=True), size)
    wanted = (size, dtype, torch.strided)
    fits = call.out is not None and (tuple(call.out.shape), call.out.dtype, call.out.layout) == wanted
    out = Layout.of(call.out) if call.out is not None and fits else Layout.contiguous(size, dtype)
    return Problem(
        op=call.op,
        a=Layout.of(call.a),
        b=Layout.of(call.b),
        out=out,
        inp=layout_of(call.inp),
        alpha=scalar_class(call.alpha),
        beta=scalar_class(call.beta) if call.inp is not None else "zero",
        epilogue=epilogue,
        device_type=call.a.device.type,
        precision=precision_of(call.a.dtype, call.a.device.type),
        prepacked=call.packed is not None,
        scale_a=layout_of(call.scale_a),
        scale_b=layout_of(call.scale_b),
        zero_b=layout_of(call.zero_b),
        encoding=call.encoding,
        fast_accum=call.fast_accum,
        c=layout_of(call.c),
        d=layout_of(call.d),
    )


def layout_of(tensor: torch.Tensor | None) -> Layout | None:
    """The layout of an operand that may be missing."""
    return None if tensor is None else Layout.of(tensor)


def result_dtype(op: Op, dtype: torch.dtype, epilogue: object) -> torch.dtype:
    """The dtype of the result where neither the caller nor a cast at the end of the epilogue names one."""
    match op:
        case "int_mm":
            return torch.int32 if epilogue is None else torch.float32
        case "scaled_mm":
            return torch.bfloat16
    return dtype
