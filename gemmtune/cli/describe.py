"""Problems and machines as the store has them, JSON texts, made readable again."""

from __future__ import annotations

import json
from typing import Any

import torch

from ..problem import Epilogue, Layout, Precision, Problem
from ..problem.epilogue import Node, Ref

__all__ = ["machine_text", "problem_of_key", "problem_text"]


def problem_of_key(key: str) -> Problem:
    """The Problem whose ``key`` this is."""
    data: dict[str, Any] = json.loads(key)
    epilogue = data["epilogue"]
    return Problem(
        op=data["op"],
        a=_layout(data["a"]),
        b=_layout(data["b"]),
        out=_layout(data["out"]),
        inp=_layout(data["inp"]) if data["inp"] else None,
        alpha=data["alpha"],
        beta=data["beta"],
        epilogue=_epilogue(epilogue) if epilogue else None,
        device_type=data["device_type"],
        precision=Precision(**data["precision"]),
        prepacked=data["prepacked"],
    )


def problem_text(key: str) -> str:
    """What ``str`` of the problem gives; the key itself if it is of another version and does not read as a problem."""
    try:
        return str(problem_of_key(key))
    except (KeyError, TypeError, ValueError, AttributeError):
        return key


def machine_text(fingerprint: str) -> str:
    """The fields of a fingerprint on one line, without the long list of instruction sets; the text itself if it is no JSON."""
    try:
        fields: dict[str, Any] = json.loads(fingerprint)
        return ", ".join(f"{name}={value}" for name, value in fields.items() if name != "isa")
    except (ValueError, AttributeError):
        return fingerprint


def _layout(data: dict[str, Any]) -> Layout:
    return Layout(size=tuple(data["size"]), stride=tuple(data["stride"]), dtype=_dtype(data["dtype"]), offset=data["offset"])


def _epilogue(data: dict[str, Any]) -> Epilogue:
    nodes = tuple(Node(op=n["op"], args=tuple(map(_arg, n["args"])), dtype=_dtype(n["dtype"])) for n in data["nodes"])
    return Epilogue(nodes=nodes, operands=tuple(map(_layout, data["operands"])))


def _arg(value: Any) -> Any:
    return Ref(int(value[1:])) if isinstance(value, str) and value.startswith("%") else value


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
