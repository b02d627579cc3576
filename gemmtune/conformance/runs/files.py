"""Files that a run writes: reports and failing cases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ...errors import ConformanceError

__all__ = ["json_text", "make_folder", "write"]


def json_text(data: Any) -> str:
    """``data`` as JSON. Numbers that JSON does not have become the texts ``nan``, ``inf`` and ``-inf``."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False, default=str)


def write(option: str, path: Path | str, text: str) -> None:
    """Write a file that an option asked for. Raises ConformanceError where it cannot be written."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConformanceError(f"{option}: cannot write {path}: {error.strerror}") from error


def make_folder(option: str, path: str) -> None:
    """Make a folder that an option asked for. Raises ConformanceError where that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConformanceError(f"{option}: cannot make the folder {path!r}: {error.strerror}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
