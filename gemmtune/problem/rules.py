"""What makes a Problem one: the rules that its operands have to obey, with the values in the message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from ..errors import InvalidProblemError
from .dtypes import DTYPES, FLOAT8, dtype_name
from .layout import Layout

if TYPE_CHECKING:
    from .problem import Problem

__all__ = ["BATCHED_OPS", "DENSE_OPS", "OPS", "Op", "check", "why_not_dense"]

Op = Literal["mm", "addmm", "bmm", "baddbmm", "int_mm", "scaled_mm"]
DENSE_OPS: tuple[Op, ...] = ("mm", "addmm", "bmm", "baddbmm")
"""Operands of one float dtype."""
OPS: tuple[Op, ...] = (*DENSE_OPS, "int_mm", "scaled_mm")
BATCHED_OPS: tuple[Op, ...] = ("bmm", "baddbmm")
_SCALED_OUT = (torch.float32, torch.float16, torch.bfloat16)


def why_not_dense(problem: Problem) -> str | None:
    """Why a backend of the dense operations has nothing for the problem; None if its operation is one of them."""
    if problem.op in DENSE_OPS:
        return None
    return f"{problem.op} is not an operation of this backend, which has {', '.join(DENSE_OPS)}"


def check(problem: Problem) -> None:
    """Raises InvalidProblemError unless the operands fit together and the operation has such dtypes."""
    if problem.op not in OPS:
        raise InvalidProblemError(f"op: got {problem.op!r}, expected one of {', '.join(OPS)}")
    rank = 3 if problem.op in BATCHED_OPS else 2
    for name, layout in _matrices(problem):
        if problem.op in DENSE_OPS:
            _expect_dtype("dtype", layout.dtype, tuple(DTYPES))
        if len(layout.size) != rank:
            raise InvalidProblemError(f"{problem.op}: {name} must be a {rank}-D tensor, got shape {list(layout.size)}")
    _check_input_dtypes(problem)
    a, b = problem.a.size, problem.b.size
    if a[-1] != b[-2] or a[:-2] != b[:-2]:
        raise InvalidProblemError(
            f"{problem.op}: shapes do not fit, got a {list(a)} and b {list(b)}; "
            f"expected a [{'B, ' * (rank - 2)}M, K] and b [{'B, ' * (rank - 2)}K, N]"
        )
    expected = (*a[:-1], b[-1])
    if problem.out.size != expected:
        raise InvalidProblemError(f"{problem.op}: out must have shape {list(expected)}, got {list(problem.out.size)}")
    _check_inp(problem, expected)
    _check_scales(problem)
    if problem.op not in DENSE_OPS and (problem.epilogue is not None or (problem.alpha, problem.beta) != ("one", "zero")):
        raise InvalidProblemError(f"{problem.op}: takes no alpha, beta or epilogue, got {problem}")


def _matrices(problem: Problem) -> tuple[tuple[str, Layout], ...]:
    return (("a", problem.a), ("b", problem.b), ("out", problem.out))


def _expect_dtype(what: str, dtype: torch.dtype, legal: tuple[torch.dtype, ...]) -> None:
    if dtype not in legal:
        expected = f"one of {', '.join(map(dtype_name, legal))}" if len(legal) > 1 else dtype_name(legal[0])
        raise InvalidProblemError(f"{what}: got {dtype}, expected {expected}")


def _check_input_dtypes(problem: Problem) -> None:
    if problem.op in DENSE_OPS:
        if problem.a.dtype != problem.b.dtype:
            raise InvalidProblemError(
                f"{problem.op}: a and b must have the same dtype, got {problem.a.dtype} and {problem.b.dtype}; cast one of them"
            )
        return
    inputs, outputs = {"int_mm": ((torch.int8,), (torch.int32,)), "scaled_mm": (FLOAT8, _SCALED_OUT)}[problem.op]
    for name, layout in _matrices(problem):
        _expect_dtype(f"{problem.op}: dtype of {name}", layout.dtype, outputs if name == "out" else inputs)


def _check_inp(problem: Problem, expected: tuple[int, ...]) -> None:
    if (problem.inp is not None) != (problem.op in ("addmm", "baddbmm")):
        raise InvalidProblemError(f"{problem.op}: takes {'no' if problem.inp is not None else 'an'} added operand")
    if problem.inp is not None and problem.inp.dtype != problem.a.dtype:
        raise InvalidProblemError(f"{problem.op}: inp must have the dtype of a, got {problem.inp.dtype} and {problem.a.dtype}")
    named = [("inp", problem.inp)] if problem.inp is not None else []
    named += [(f"epilogue_args[{i}]", x) for i, x in enumerate(problem.epilogue.operands if problem.epilogue else ())]
    for name, layout in named:
        try:
            layout.expanded(expected)
        except InvalidProblemError as error:
            raise InvalidProblemError(f"{problem.op}: {name}: {error}") from None


def _check_scales(problem: Problem) -> None:
    if problem.op != "scaled_mm":
        if problem.scale_a is not None or problem.scale_b is not None or problem.fast_accum:
            raise InvalidProblemError(f"{problem.op}: takes no scale_a, scale_b or fast_accum; scaled_mm does")
        return
    for name, scale, by_line in (("scale_a", problem.scale_a, (problem.m, 1)), ("scale_b", problem.scale_b, (1, problem.n))):
        if scale is None:
            raise InvalidProblemError(f"scaled_mm: {name} is missing, expected the layout of a float32 tensor")
        _expect_dtype(f"scaled_mm: dtype of {name}", scale.dtype, (torch.float32,))
        if scale.size not in ((), (1,), (1, 1), by_line):
            raise InvalidProblemError(f"scaled_mm: {name} must have one element or shape {list(by_line)}, got {list(scale.size)}")
