"""Data that others wrote: JSON within bounds, and texts without control codes."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

MOST_BYTES = 2**28
"""Largest file of JSON."""
MOST_DEPTH = 50
"""Deepest nesting of JSON. Python's recursion limit lies far above."""
LARGEST_INTEGER = 2**63 - 1
_MOST_DIGITS = len(str(-LARGEST_INTEGER))
SHOWN_CHARS = 80
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Characters that a terminal obeys or hides: control codes except tab and newline, and marks of the direction of text."""


def read_json(path: Path | str, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in a file of JSON, as ``parse_json`` does. Raises what ``read_text`` and ``parse_json`` raise."""
    return parse_json(read_text(path, most_bytes=most_bytes))


def read_text(path: Path | str, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file in UTF-8. Raises OSError if it cannot be read, ValueError if it is no such text or too long."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"got {max(size, len(data))} bytes, expected at most {most_bytes}")
    return data.decode("utf-8")


def text_of(path: Path | str) -> str:
    """Return the text of a file, such as one of Linux in /proc, or "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, with ``Infinity`` and ``NaN`` as numbers, as Python writes constants of an epilogue.

    Raises ValueError if it is not JSON, nested deeper than MOST_DEPTH, or has a number of more digits than 64 bits or a float hold.
    """
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_number)
    except RecursionError:
        raise ValueError(f"got values nested deeper than {MOST_DEPTH}, expected fewer levels") from None
    level, depth = [value], 0
    while level := [child for x in level if isinstance(x, (dict, list)) for child in (x.values() if isinstance(x, dict) else x)]:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"got values nested deeper than {MOST_DEPTH}, expected fewer levels")
    return value


def visible(text: str, *, as_json: bool = False) -> str:
    r"""Return the text with characters that a terminal obeys or hides as escapes such as ``\x1b``, in a JSON text as ``\u001b``."""
    if text.isprintable():  # far quicker than the search, and false for all of them
        return text
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}" if as_json else ascii(found[0])[1:-1], text)


def shown(value: object) -> str:
    """Return a short text of any value for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a value of type {type(value).__name__} that is too long to show"
    return shorter(text)


def _integer(text: str) -> int:
    value = int(text) if len(text) <= _MOST_DIGITS else None
    if value is None or abs(value) > LARGEST_INTEGER:
        raise ValueError(f"got the number {shorter(text)}, expected at most 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"got the number {shorter(text)}, expected one that a float holds")
    return value


def shorter(text: str) -> str:
    """Return the beginning of a long text, with escapes for control codes."""
    text = visible(text)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
