"""Files that name cases not to run, or cases that are known to fail.

A line is a case id or a pattern with ``*`` and ``?``, and after ``#`` the reason::

    bound:mm-f16-*          # half precision accumulates in half precision, issue 12
    # a line of its own is a comment
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConformanceError

__all__ = ["CaseList", "Line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: ``pattern`` and the reason for it."""

    number: int
    pattern: str
    reason: str


class CaseList:
    """The lines of one file. The first line that fits a case counts."""

    def __init__(self, path: str, lines: tuple[Line, ...]) -> None:
        self.path = path
        self.lines = lines
        # Ids have brackets nowhere, so that fnmatch's [...] would only be in the way.
        expressions = [re.compile(fnmatch.translate(line.pattern.replace("[", "[[]"))) for line in lines]
        self._compiled = list(zip(lines, expressions, strict=True))

    @classmethod
    def read(cls, path: str | None) -> CaseList:
        """The list of a file; an empty one for None. Raises ConformanceError where the file cannot be read."""
        if path is None:
            return cls("", ())
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConformanceError(f"{path}: got {error}, expected a text file of case ids") from error
        split = [(number, *line.partition("#")[::2]) for number, line in enumerate(text.splitlines(), 1)]
        return cls(
            path,
            tuple(
                Line(number=number, pattern=pattern.strip(), reason=reason.strip() or "no reason is given")
                for number, pattern, reason in split
                if pattern.strip()
            ),
        )

    def reason(self, case_id: str) -> str | None:
        """Why a case is listed; None if it is not."""
        for line, expression in self._compiled:
            if expression.match(case_id):
                return line.reason
        return None

    def unmatched(self, ids: Iterable[str]) -> CaseList:
        """The lines that fit none of ``ids``."""
        left = dict(self._compiled)
        for case_id in ids:
            if not left:
                break
            for line in [line for line, expression in left.items() if expression.match(case_id)]:
                del left[line]
        return CaseList(self.path, tuple(left))

    def complaints(self) -> list[str]:
        """A text for each line, as one that fits no case."""
        return [
            f"{self.path}:{line.number}: no case has the id {line.pattern!r}; correct the line or remove it" for line in self.lines
        ]
