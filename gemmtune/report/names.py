"""Texts of stored keys: problems, classes of problems, and machines."""

import json
from typing import Any

from ..problem.rows import RowClass
from ..store.row import stored_problem


def problem_text(key: str) -> str:
    """Return the text of the problem with this key, or the key itself if another version wrote it."""
    return str(stored_problem(key) or key)


def class_text(key: str) -> str:
    """Return the text of the class with this key, or the key itself if another version wrote it."""
    problem = stored_problem(key)
    return key if problem is None else str(RowClass(problem=problem))


def machine_text(fingerprint: str) -> str:
    """Return the fields of a fingerprint on one line without instruction sets, or the text itself if it has none."""
    return ", ".join(f"{name}={value}" for name, value in fields_of(fingerprint).items() if name != "isa") or fingerprint


def fields_of(fingerprint: str) -> dict[str, Any]:
    """Return the values of a machine's fingerprint by name, {} if it has none."""
    try:
        fields = json.loads(fingerprint)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
