"""What makes a Problem one: the rules that its operands have to obey, with the values in the message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import InvalidProblemError
from .dtypes import DTYPES, FLOAT8, dtype_name
from .layout import Layout
from .scales import BLOCKS_OF_A, BLOCKS_OF_B, BLOCKS_OF_WEIGHTS, Blocks, block_of, scale_shapes

if TYPE_CHECKING:
    from .problem import Problem

__all__ = [
    "BATCHED_OPS",
    "DENSE_OPS",
    "ENCODINGS",
    "FLOAT_OPS",
    "OPS",
    "QUANTIZED_OPS",
    "Encoding",
    "Op",
    "check",
    "why_not",
    "why_not_dense",
]

Op = Literal["mm", "addmm", "bmm", "baddbmm", "mm_plus_mm", "int_mm", "mixed_mm", "scaled_mm"]
DENSE_OPS: tuple[Op, ...] = ("mm", "addmm", "bmm", "baddbmm")
"""One product of operands of one float dtype."""
FLOAT_OPS: tuple[Op, ...] = (*DENSE_OPS, "mm_plus_mm")
"""Operands of one float dtype."""
QUANTIZED_OPS: tuple[Op, ...] = ("int_mm", "mixed_mm", "scaled_mm")
"""Operands of 8 bits or fewer, or one of them."""
OPS: tuple[Op, ...] = (*FLOAT_OPS, *QUANTIZED_OPS)
BATCHED_OPS: tuple[Op, ...] = ("bmm", "baddbmm")
Encoding = Literal["", "int4", "uint4"]
"""How b's elements are read: as its dtype says, or two numbers out of each uint8, that of the even k in the low four bits."""
ENCODINGS: tuple[Encoding, ...] = ("", "int4", "uint4")
_NARROW_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def why_not(problem: Problem, ops: Sequence[Op]) -> str | None:
    """Why a backend of those operations has nothing for the problem; None if its operation is one of them."""
    if problem.op in ops:
        return None
    return f"{problem.op} is not an operation of this backend, which has {', '.join(ops)}"


def why_not_dense(problem: Problem) -> str | None:
    """``why_not`` for a backend of the dense operations."""
    return why_not(problem, DENSE_OPS)


def check(problem: Problem) -> None:
    """Raises InvalidProblemError unless the operands fit together and the operation has such dtypes."""
    if problem.op not in OPS:
        raise InvalidProblemError(f"op: got {problem.op!r}, expected one of {', '.join(OPS)}")
    rank = 3 if problem.op in BATCHED_OPS else 2
    _check_second(problem)
    for name, layout in _matrices(problem):
        if problem.op in FLOAT_OPS:
            _expect_dtype("dtype", layout.dtype, tuple(DTYPES))
        if len(layout.size) != rank:
            raise InvalidProblemError(f"{problem.op}: {name} must be a {rank}-D tensor, got shape {list(layout.size)}")
    _check_dtypes(problem)
    a, b = problem.a.size, _b_size(problem)
    if a[-1] != b[-2] or a[:-2] != b[:-2]:
        packed = " (two rows in each byte)" if problem.encoding else ""
        raise InvalidProblemError(
            f"{problem.op}: shapes do not fit, got a {list(a)} and b {list(b)}{packed}; "
            f"expected a [{'B, ' * (rank - 2)}M, K] and b [{'B, ' * (rank - 2)}K, N]{_packing_remedy(problem)}"
        )
    _check_second_fits(problem)
    expected = (*a[:-1], b[-1])
    if problem.out.size != expected:
        raise InvalidProblemError(f"{problem.op}: out must have shape {list(expected)}, got {list(problem.out.size)}")
    _check_inp(problem, expected)
    _check_scales(problem)
    if problem.op not in DENSE_OPS and (problem.alpha, problem.beta) != ("one", "zero"):
        raise InvalidProblemError(f"{problem.op}: takes no alpha or beta, got {problem}; give an epilogue that multiplies or adds")


def _b_size(problem: Problem) -> tuple[int, ...]:
    """The size of b in numbers rather than bytes."""
    size = problem.b.size
    return (*size[:-2], 2 * size[-2], size[-1]) if problem.encoding else size


def _packing_remedy(problem: Problem) -> str:
    """What to do where shapes do not fit because of how b is packed, or is not said to be."""
    k, rows = problem.a.size[-1], problem.b.size[-2]
    if problem.encoding and k % 2:
        return ", and an even K; append a column of zeros to a and a row to the weight"
    if problem.op == "mixed_mm" and not problem.encoding and problem.b.dtype == torch.uint8 and 2 * rows == k:
        return "; if b has two numbers in each byte, give encoding 'int4' or 'uint4'"
    return ""


def _matrices(problem: Problem) -> tuple[tuple[str, Layout], ...]:
    second = [(name, layout) for name, layout in (("c", problem.c), ("d", problem.d)) if layout is not None]
    return (("a", problem.a), ("b", problem.b), ("out", problem.out), *second)


def _check_second(problem: Problem) -> None:
    """mm_plus_mm has the operands of a second product, and no other operation does."""
    for name, layout in (("c", problem.c), ("d", problem.d)):
        if layout is None and problem.op == "mm_plus_mm":
            raise InvalidProblemError(f"mm_plus_mm: {name} is missing, expected c [M, K2] and d [K2, N]")
        if layout is not None and problem.op != "mm_plus_mm":
            raise InvalidProblemError(f"{problem.op}: takes no {name}, got shape {list(layout.size)}; mm_plus_mm does")


def _check_second_fits(problem: Problem) -> None:
    if problem.c is None or problem.d is None:
        return
    (m, k2), (rows, n) = problem.c.size, problem.d.size
    if k2 != rows or (m, n) != (problem.a.size[0], problem.b.size[1]):
        raise InvalidProblemError(
            f"{problem.op}: shapes do not fit, got a {list(problem.a.size)}, b {list(problem.b.size)}, "
            f"c {list(problem.c.size)} and d {list(problem.d.size)}; expected a [M, K], b [K, N], c [M, K2] and d [K2, N]"
        )


def _expect_dtype(what: str, dtype: torch.dtype, legal: Sequence[torch.dtype]) -> None:
    if dtype not in legal:
        expected = f"one of {', '.join(map(dtype_name, legal))}" if len(legal) > 1 else dtype_name(legal[0])
        raise InvalidProblemError(f"{what}: got {dtype}, expected {expected}")


def _check_dtypes(problem: Problem) -> None:
    op = problem.op
    if problem.encoding not in ENCODINGS:
        raise InvalidProblemError(f"{op}: encoding: got {problem.encoding!r}, expected one of {', '.join(map(repr, ENCODINGS))}")
    if problem.encoding and op != "mixed_mm":
        raise InvalidProblemError(f"{op}: takes no packed b; mixed_mm does")
    if op in FLOAT_OPS:
        for name, layout in (("b", problem.b), ("c", problem.c), ("d", problem.d)):
            if layout is not None and problem.a.dtype != layout.dtype:
                raise InvalidProblemError(
                    f"{op}: a and {name} must have the same dtype, got {problem.a.dtype} and {layout.dtype}; cast one of them"
                )
        return
    weights = (torch.uint8,) if problem.encoding else (torch.int8, torch.uint8, *FLOAT8)
    a, b, out = {
        "int_mm": ((torch.int8,), (torch.int8,), _NARROW_FLOATS if problem.epilogue else (torch.int32,)),
        "mixed_mm": (_NARROW_FLOATS, weights, _NARROW_FLOATS),
        "scaled_mm": (FLOAT8, FLOAT8, _NARROW_FLOATS),
    }[op]
    for (name, layout), legal in zip(_matrices(problem), (a, b, out), strict=True):
        _expect_dtype(f"{op}: dtype of {name}", layout.dtype, legal)


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
    given = {"scale_a": problem.scale_a, "scale_b": problem.scale_b, "zero_b": problem.zero_b}
    taken = {"scaled_mm": ("scale_a", "scale_b"), "mixed_mm": ("scale_b", "zero_b")}.get(problem.op, ())
    for name, layout in given.items():
        if layout is not None and name not in taken:
            raise InvalidProblemError(f"{problem.op}: takes no {name}, got shape {list(layout.size)}")
    if problem.fast_accum and problem.op != "scaled_mm":
        raise InvalidProblemError(f"{problem.op}: takes no fast_accum; scaled_mm does")
    if problem.op == "scaled_mm":
        for name, blocks, size in (("scale_a", BLOCKS_OF_A, problem.a.size), ("scale_b", BLOCKS_OF_B, problem.b.size)):
            _check_scale(problem, name, given[name], size, blocks, (torch.float32,))
    elif problem.op == "mixed_mm":
        legal = tuple(dict.fromkeys((torch.float32, problem.a.dtype)))
        for name in taken:
            if given[name] is not None:
                _check_scale(problem, name, given[name], _b_size(problem), BLOCKS_OF_WEIGHTS, legal)
        if problem.zero_b is not None and problem.scale_b is None:
            raise InvalidProblemError("mixed_mm: got zero_b without scale_b, expected both: b is read as (b - zero_b) * scale_b")


def _check_scale(
    problem: Problem, name: str, scale: Layout | None, size: tuple[int, ...], blocks: Blocks, dtypes: Sequence[torch.dtype]
) -> None:
    what = f"{problem.op}: {name}"
    if scale is None:
        raise InvalidProblemError(f"{what} is missing, expected a scale of {dtype_name(dtypes[0])}")
    _expect_dtype(f"{problem.op}: dtype of {name}", scale.dtype, dtypes)
    rows, cols = size
    if block_of(scale.size, (rows, cols), blocks) is None:
        shapes = dict.fromkeys(str(list(shape)) for shape in scale_shapes((rows, cols), blocks)[1:])
        raise InvalidProblemError(f"{what} must have one element or shape {' or '.join(shapes)}, got {list(scale.size)}")
