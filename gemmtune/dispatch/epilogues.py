"""Epilogue functions of calls, traced once where that is safe."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..problem import Epilogue
from ..problem.trace import trace

__all__ = ["traced"]

_traced: dict[Hashable, Epilogue] = {}
_CAPACITY = 4096
_STABLE_MODULES = ("torch", "math", "operator")
"""Modules whose attributes a program does not change while it runs."""


def traced(function: Callable[..., Any], acc_dtype: torch.dtype, operands: Sequence[torch.Tensor]) -> Epilogue:
    """The graph of an epilogue function for these operands.

    Tracing takes milliseconds, so its result is kept, but only for functions whose meaning is visible from outside: code that uses
    numbers, its arguments and torch. A function that reads attributes of objects or calls other functions is traced at every call,
    because a change of what it reads must not be missed.
    """
    meaning = meaning_of(function)
    if meaning is None:
        return trace(function, acc_dtype, operands)
    key = (meaning, acc_dtype, tuple((o.dtype, tuple(o.shape), o.stride(), o.data_ptr() % 16) for o in operands))
    if key not in _traced:
        if len(_traced) >= _CAPACITY:
            _traced.clear()
        _traced[key] = trace(function, acc_dtype, operands)
    return _traced[key]


def meaning_of(function: Callable[..., Any]) -> Hashable | None:
    """A key equal for functions that trace to the same graph; None where that cannot be seen."""
    if isinstance(function, types.BuiltinFunctionType):
        return function
    if not isinstance(function, types.FunctionType):
        return None
    if (function.__module__ or "").partition(".")[0] in _STABLE_MODULES and function.__closure__ is None:
        return function
    code = function.__code__
    values: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    values += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    if any(isinstance(constant, types.CodeType) for constant in code.co_consts) or not all(map(_is_plain, values)):
        return None
    return (code, tuple((type(v), v) for v in values))


def _is_plain(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _STABLE_MODULES
    return isinstance(value, (int, float, bool, torch.dtype, types.BuiltinFunctionType, type(None)))
