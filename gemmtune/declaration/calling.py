"""The calling convention of a GEMM's function: what it gets by position, and what as keywords."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..choice import Scalars, Tensors
from ..errors import SubjectError
from ..problem import Problem
from ..problem.operations import OPTIONS
from .labels import ROWS
from .traits import Traits

Caller = Callable[[Tensors, Scalars, torch.Tensor | None], object]
"""Function ``caller(tensors, scalars, out)`` that calls a GEMM for one problem and returns its result."""

_MULTIPLIED = ("a", "b", "c", "d")
_PERMISSIONS = ("fast_accum",)
"""Options that a GEMM may make no use of, and is not asked to take."""


def takes(function: Callable[..., object], name: str) -> bool:
    """Return False if the function is known to have no parameter of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions and callable objects may have no signature
        return True
    return name in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def takes_two(function: Callable[..., object]) -> bool:
    """Return True if a function is known to take two arguments alone, as f(a, b)."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def check_keywords(name: str, function: Callable[..., object], traits: Traits) -> None:
    """Raise SubjectError if the traits declare a keyword that the function does not take."""
    adds = any(ROWS[op].operand("inp") is not None for op in traits.ops or ())
    declared = [word for word in ("out", *("alpha", "beta") * adds) if getattr(traits, word)]
    if missing := [word for word in declared if not takes(function, word)]:
        taken = ", ".join(inspect.signature(function).parameters)
        add = "that parameter" if len(missing) == 1 else "these parameters"
        raise SubjectError(f"{name}: declares {', '.join(missing)}, but takes only {taken}; add {add}, or declare less")


def caller_of(function: Callable[..., object], problem: Problem, traits: Traits, added: str | None) -> Caller:
    """Return a caller that passes factors and the operands of an epilogue by position, and the rest as keywords.

    ``added`` is the keyword of the added operand. None: it comes first, as in torch.
    """
    if problem.sparsity is not None:
        return _sparse_caller(function, traits, added)
    places = {role: place for place, (role, _) in enumerate(problem.operands)}
    first = () if added is not None or "inp" not in places else (places["inp"],)
    by_position = (*first, *(places[role] for role in _MULTIPLIED if role in places))
    by_name, together = _keywords(problem, places)
    if added is not None and "inp" in places:
        by_name[added] = places["inp"]
    scalars_taken = tuple((i, name) for i, name in enumerate(("alpha", "beta")) if getattr(traits, name))
    options = {name: getattr(problem, name) for name in problem.operation.options if name not in _PERMISSIONS}
    fixed: dict[str, Any] = {name: value for name, value in options.items() if value != OPTIONS[name]}
    if problem.float8:
        fixed["out_dtype"] = problem.out.dtype
    operands = len(places)

    def call(tensors: Tensors, scalars: Scalars, out: torch.Tensor | None) -> object:
        keywords = dict(fixed)
        for name, place in by_name.items():
            keywords[name] = tensors[place]
        for name, them in together.items():
            keywords[name] = tuple(tensors[place] for place in them)
        if out is not None:
            keywords["out"] = out
        if scalars:
            for i, name in scalars_taken:
                keywords[name] = scalars[i]
        return function(*[tensors[place] for place in by_position], *tensors[operands:], **keywords)

    return call


def _keywords(problem: Problem, places: Mapping[str, int]) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Return the places of operands that are keywords of their own, and of those that share a keyword as a tuple."""
    alone: dict[str, int] = {}
    together: dict[str, tuple[int, ...]] = {}
    for operand in problem.operation.operands:
        if operand.role not in places or operand.role in (*_MULTIPLIED, "inp"):
            continue
        if operand.keyword:
            together[operand.keyword] = (*together.get(operand.keyword, ()), places[operand.role])
        else:
            alone[operand.role] = places[operand.role]
    return alone, together


def _sparse_caller(function: Callable[..., object], traits: Traits, added: str | None) -> Caller:
    """Return a caller of bsr @ x, the transpose of the problem: x = aᵀ, bsr is the weight, inp and out are transposed."""
    scalars_taken = tuple((i, name) for i, name in enumerate(("alpha", "beta")) if getattr(traits, name))

    def call(tensors: Tensors, scalars: Scalars, out: torch.Tensor | None) -> object:
        a, weight, *inp = tensors
        keywords: dict[str, Any] = {name: scalars[i] for i, name in scalars_taken} if scalars else {}
        given = [weight, a.t()]
        if inp and added is not None:
            keywords[added] = _transposed(inp[0])
        elif inp:
            given.insert(0, _transposed(inp[0]))
        if out is not None:
            keywords["out"] = out.t()
        result = function(*given, **keywords)
        return result.t() if isinstance(result, torch.Tensor) and result.dim() == 2 else result

    return call


def _transposed(inp: torch.Tensor) -> torch.Tensor:
    """Return ``inp``, which broadcasts to a matrix, in a form that broadcasts to the transposed matrix."""
    return inp.unsqueeze(-1) if inp.dim() == 1 else inp.t() if inp.dim() == 2 else inp
