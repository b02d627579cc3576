"""Problems and machines as the store has them, JSON texts, made readable again."""

from __future__ import annotations

import json
from typing import Any

from ..problem import Problem
from ..problem.rebuild import rebuilt

__all__ = ["machine_text", "problem_of_key", "problem_text"]


def problem_of_key(key: str) -> Problem:
    """The Problem whose ``key`` this is."""
    return rebuilt(json.loads(key))


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
