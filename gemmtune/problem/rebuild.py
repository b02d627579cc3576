"""Problems out of their plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InvalidProblemError
from .epilogue import Epilogue, Node, Ref
from .layout import Layout
from .precision import Precision
from .problem import Problem

__all__ = ["rebuilt"]

DERIVED = ("batch", "m", "n", "k", "k2")
"""Fields of ``Problem.to_json`` that stand there for readers alone."""


def rebuilt(data: Mapping[str, Any]) -> Problem:
    """The Problem whose ``to_json`` gave ``data``. A field of another version is left out where it says nothing (None, False, "").

    Raises:
        InvalidProblemError: a field that says something is unknown here.
        KeyError, TypeError, ValueError: the data is no problem's.
    """
    known = {field.name for field in dataclasses.fields(Problem)}
    given = {name: value for name, value in data.items() if name not in DERIVED}
    for name in given.keys() - known:
        if given[name] not in (None, False, ""):
            raise InvalidProblemError(f"problem: the field {name} = {given[name]!r} is unknown to this version")
    return Problem(**{name: _value(name, value) for name, value in given.items() if name in known})


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if name == "precision":
        return Precision(**value)
    if name == "epilogue":
        return _epilogue(value)
    return _layout(value)


def _layout(data: Mapping[str, Any]) -> Layout:
    return Layout(size=tuple(data["size"]), stride=tuple(data["stride"]), dtype=_dtype(data["dtype"]), offset=data["offset"])


def _epilogue(data: Mapping[str, Any]) -> Epilogue:
    def argument(value: Any) -> Any:
        is_reference = isinstance(value, str) and value.startswith("%")
        return Ref(int(value[1:])) if is_reference else value

    nodes = [Node(op=node["op"], args=tuple(map(argument, node["args"])), dtype=_dtype(node["dtype"])) for node in data["nodes"]]
    return Epilogue(nodes=tuple(nodes), operands=tuple(_layout(layout) for layout in data["operands"]))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
