"""Files that a run reads and writes: reports, failing cases, which cases to repeat, to leave out, or that are known to fail.

A line of a list is a case id or a pattern with ``*`` and ``?``, and after ``#`` the reason::

    bound:mm-f16-*          # half precision accumulates in half precision, issue 12
    # a line of its own is a comment
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConformanceError
from ..bench.outcome import Record
from ..cases.case import Case
from ..option_table import OPTIONS
from ..options import RunOptions


def json_text(data: Any) -> str:
    """``data`` as JSON. Numbers that JSON does not have become the texts ``nan``, ``inf`` and ``-inf``."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False, default=str)


def write(option: str, path: Path | str, text: str) -> None:
    """Write a file that an option asked for. Raises ConformanceError where it cannot be written."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConformanceError(f"{option}: cannot write {path}: {error.strerror}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: ``pattern`` and the reason for it."""

    number: int
    pattern: str
    reason: str

    def fits(self, case_id: str) -> bool:
        """Whether it names a case. Ids have brackets nowhere, so that fnmatch's [...] would only be in the way."""
        return fnmatch.fnmatchcase(case_id, self.pattern.replace("[", "[[]"))


@dataclass(frozen=True, slots=True)
class CaseList:
    """The lines of one file. The first line that fits a case counts."""

    path: str
    lines: tuple[Line, ...]

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
        lines = (
            Line(number=number, pattern=pattern.strip(), reason=reason.strip() or "no reason is given")
            for number, pattern, reason in split
        )
        return cls(path, tuple(line for line in lines if line.pattern))

    def reason(self, case_id: str) -> str | None:
        """Why a case is listed; None if it is not."""
        return next((line.reason for line in self.lines if line.fits(case_id)), None)

    def unmatched(self, ids: Collection[str]) -> CaseList:
        """The lines that fit none of ``ids``."""
        return CaseList(self.path, tuple(line for line in self.lines if not any(map(line.fits, ids))))

    def complaints(self) -> list[str]:
        """A text for each line, as one that fits no case."""
        return [
            f"{self.path}:{line.number}: no case has the id {line.pattern!r}; correct the line or remove it" for line in self.lines
        ]


_KEPT = ("device", "trait", "traits", "repro", "in_process", "timeout", "sanitize")
"""Options without which the case would be another one."""


def command(options: RunOptions, words: Iterable[str], *, sanitize: bool = False) -> str:
    """The command that runs those cases alone, ``words`` as ``--repro`` takes them; under compute-sanitizer if that found it."""
    return shlex.join(["gemmtune", "conformance", options.backend, *_given(options, words, sanitize, pytest=False)])


def pytest_command(options: RunOptions, words: Iterable[str], *, sanitize: bool = False) -> str:
    """The same with pytest."""
    start = ["pytest", "-p", "gemmtune.conformance.plugin", "--pyargs", "gemmtune.conformance", f"--gemm-backend={options.backend}"]
    return shlex.join([*start, *_given(options, words, sanitize, pytest=True)])


def _given(options: RunOptions, words: Iterable[str], sanitize: bool, *, pytest: bool) -> Iterator[str]:
    given = options.given() | {"sanitize": sanitize, "repro": tuple(words)}
    for option in sorted(OPTIONS, key=lambda option: option.name == "repro"):  # which cases comes last
        value = given.get(option.name) if option.name in _KEPT else None
        flag = option.pytest_spelling if pytest else option.spelling
        if option.kind == "flag":
            yield from [flag] if value else []
        elif value is not None:
            for word in value if option.repeated else (value,):
                yield from (flag, f"{word:g}" if option.kind == "seconds" else str(word))


def cases_to_repeat(words: Sequence[str]) -> list[Case]:
    """The cases that ``--repro`` names: by id, in a file as ``@FILE``, or in the files of a folder; each once.

    Raises:
        CaseError: a text that is no case id.
        ConformanceError: a file that cannot be read, or has no case.
    """
    ids: list[str] = []
    for word in words:
        files = sorted(Path(word).glob("*.json"))
        if word.startswith("@"):
            files = [Path(word[1:])]
        elif not Path(word).is_dir():
            ids.append(word)
        elif not files:
            raise ConformanceError(f"repro: got the folder {word!r}, which has no *.json, expected one of --save-failing")
        ids += [case_id for file in files for case_id in _ids_of_file(file)]
    return [Case.parse(case_id) for case_id in dict.fromkeys(ids)]


def _ids_of_file(path: Path) -> list[str]:
    """The ids of a saved case, of the failures of a report, or of the lines of a text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConformanceError(f"repro: got {error}, expected a file of case ids") from error
    if not text.lstrip().startswith("{"):
        return [line.partition("#")[0].strip() for line in text.splitlines() if line.partition("#")[0].strip()]
    try:
        data = json.loads(text)
        return [data["case"]] if "case" in data else [failure["case"] for failure in data["failures"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConformanceError(f"repro: {path} has no case in it ({error}), expected a file of --save-failing or --json") from error


def save_failing(folder: str, options: RunOptions, record: Record) -> Path:
    """Write a failing case with its outcome to a file of its own, named after the case.

    Raises:
        ConformanceError: the folder cannot be written.
    """
    assert record.outcome is not None
    digest = hashlib.blake2b(record.case.id.encode(), digest_size=4).hexdigest()
    path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', record.case.id)}.{digest}.json"
    data = {"schema": 1, "gemm": options.backend, "case": record.case.id, "repeat": command(options, [record.case.id])}
    write("save_failing", path, json_text(data | {"outcome": record.outcome.as_json()}))
    return path
