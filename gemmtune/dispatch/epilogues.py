"""Epilogue functions of calls, traced once where that is safe."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..problem import Epilogue
from ..problem.fused import Then
from ..problem.trace import trace

_traced: dict[Hashable, Epilogue] = {}
_codes: dict[int, tuple[types.CodeType, int, tuple[str, ...] | None]] = {}
"""Number of a code object and the names that it looks up, by id. The object is kept so that no other gets that id."""
_numbers = itertools.count()
_CAPACITY = 4096
_STABLE_MODULES = ("torch", "math", "operator")
"""Modules whose attributes a program does not change while it runs."""
_PLAIN = frozenset((int, float, bool, torch.dtype, types.BuiltinFunctionType, type(None)))


def traced(function: Callable[..., Any], acc_dtype: torch.dtype, operands: Sequence[torch.Tensor]) -> Epilogue:
    """Return the graph of an epilogue function for these operands.

    Tracing takes milliseconds, so graphs are cached for functions whose meaning their code shows: it uses numbers, its arguments
    and torch. A function that reads attributes of objects or calls other functions is traced at every call, because whatever it
    reads may change.
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
    """Return a key that is equal for functions with the same graph, or None if their code does not show it. Hot path."""
    kind = function.__class__
    if kind is types.BuiltinFunctionType:
        return function
    if kind is Then:
        then = meaning_of(function.function)  # type: ignore[attr-defined]
        return None if then is None else (function.first, then)  # type: ignore[attr-defined]
    if kind is not types.FunctionType:
        return None
    code, cells = function.__code__, function.__closure__
    _, number, names = _codes.get(id(code)) or _known(code)
    if (function.__module__ or "").partition(".")[0] in _STABLE_MODULES and cells is None:
        return function
    if names is None:
        return None
    outside = function.__globals__
    values = [outside[name] for name in names if name in outside]
    for cell in cells or ():
        values.append(cell.cell_contents)
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in values:
        stable = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in _STABLE_MODULES
        if value.__class__ not in _PLAIN and not stable:
            return None
    return (number, *values, *map(type, values))


def _known(code: types.CodeType) -> tuple[types.CodeType, int, tuple[str, ...] | None]:
    """Return the code with a unique number and the names that it looks up, or None for the names if it makes functions."""
    if len(_codes) >= _CAPACITY:
        _codes.clear()
    inner = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    _codes[id(code)] = known = (code, next(_numbers), None if inner else code.co_names)
    return known
