"""Texts of stored keys: problems, classes of problems, and machines."""

from __future__ import annotations

import json
from typing import Any

from ..problem import Problem
from ..problem.rows import RowClass


def problem_of(key: str) -> Problem | None:
    """Return the problem with this key, None if another version wrote it."""
    try:
        return Problem.from_json(json.loads(key))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def problem_text(key: str) -> str:
    """Return the text of the problem with this key, or the key itself if another version wrote it."""
    problem = problem_of(key)
    return key if problem is None else str(problem)


def class_text(key: str) -> str:
    """Return the text of the class with this key, or the key itself if another version wrote it."""
    try:
        return str(RowClass(problem=Problem.from_json(json.loads(key))))
    except (KeyError, TypeError, ValueError, AttributeError):
        return key


def machine_text(fingerprint: str) -> str:
    """Return the fields of a fingerprint on one line without instruction sets, or the text itself if it is not JSON."""
    try:
        fields: dict[str, Any] = json.loads(fingerprint)
        return ", ".join(f"{name}={value}" for name, value in fields.items() if name != "isa")
    except (ValueError, AttributeError):
        return fingerprint
