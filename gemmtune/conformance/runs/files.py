"""Files of a run: reports, failing cases, cases to repeat, lists of cases to skip or known to fail.

A line of a list is a case id or a pattern with ``*`` and ``?``, then ``#`` and the reason::

    bound:mm-f16-*          # half precision accumulates in half precision, issue 12
    # a comment may have its own line
"""

import fnmatch
import hashlib
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConformanceError
from ...foreign import parse_json
from ...replacing import write_text
from ..bench.outcome import Record
from ..cases.case import Case
from ..option_table import OPTIONS
from ..options import RunOptions


def json_text(data: Any) -> str:
    """Return ``data`` as JSON text. NaN and infinities become the texts ``nan``, ``inf`` and ``-inf``."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False, default=str)


def write(option: str, path: Path | str, text: str) -> None:
    """Write the file of an option. Raises ConformanceError if it cannot be written."""
    try:
        write_text(path, text + "\n")
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
    """One line of a list: a pattern and the reason for it."""

    number: int
    pattern: str
    reason: str

    def fits(self, case_id: str) -> bool:
        """Return True if the line matches a case. Ids have no brackets, so fnmatch's [...] is switched off."""
        return fnmatch.fnmatchcase(case_id, self.pattern.replace("[", "[[]"))


@dataclass(frozen=True, slots=True)
class CaseList:
    """Lines of one file. The first line that matches a case counts."""

    path: str
    lines: tuple[Line, ...]

    @classmethod
    def read(cls, path: str | None) -> "CaseList":
        """Read the list of a file, or return an empty one for None. Raises ConformanceError if the file cannot be read."""
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
        """Return the reason for which a case is listed, or None if it is not listed."""
        return next((line.reason for line in self.lines if line.fits(case_id)), None)

    def unmatched(self, ids: Collection[str]) -> "CaseList":
        """Return the list of those lines that match none of ``ids``."""
        return CaseList(self.path, tuple(line for line in self.lines if not any(map(line.fits, ids))))

    def complaints(self) -> list[str]:
        """Return a complaint for each line, saying that it matches no case."""
        return [
            f"{self.path}:{line.number}: no case has the id {line.pattern!r}; correct the line or remove it" for line in self.lines
        ]


_KEPT = ("device", "trait", "traits", "repro", "in_process", "timeout", "sanitize")
"""Options that change what a case tests. A command that repeats the case keeps them."""


def command(options: RunOptions, words: Iterable[str], *, sanitize: bool = False) -> str:
    """Return the command that repeats some cases, the values of ``--repro``, under compute-sanitizer if ``sanitize``."""
    return shlex.join(["gemmtune", "conformance", options.backend, *words_of(_kept(options, words, sanitize), pytest=False)])


def pytest_command(options: RunOptions, words: Iterable[str], *, sanitize: bool = False) -> str:
    """Return the same command for pytest."""
    start = ["pytest", "-p", "gemmtune.conformance.plugin", "--pyargs", "gemmtune.conformance", f"--gemm-backend={options.backend}"]
    return shlex.join([*start, *words_of(_kept(options, words, sanitize), pytest=True)])


def _kept(options: RunOptions, words: Iterable[str], sanitize: bool) -> dict[str, Any]:
    given = options.given() | {"sanitize": sanitize, "repro": tuple(words)}
    return {name: given[name] for name in _KEPT if name in given}


def words_of(given: Mapping[str, Any], *, pytest: bool) -> Iterator[str]:
    """Yield the words by which options are given on gemmtune's command line, or on pytest's."""
    for option in sorted(OPTIONS, key=lambda option: option.name == "repro"):  # --repro comes last
        value, flag = given.get(option.name), option.pytest_spelling if pytest else option.spelling
        if option.kind == "flag":
            yield from [flag] if value else []
        elif value is not None:
            for word in value if option.repeated else (value,):
                yield from (flag, f"{word:g}" if option.kind == "seconds" else str(word))


def cases_to_repeat(words: Sequence[str]) -> list[Case]:
    """Return the cases that ``--repro`` names by id, as ``@FILE`` or as a folder of files. Each case comes once.

    Raises CaseError for a text that is no case id, and ConformanceError for a file that cannot be read or has no case.
    """
    ids: list[str] = []
    for word in words:
        files = sorted(Path(word).glob("*.json"))
        if word.startswith("@"):
            files = [Path(word[1:])]
        elif not Path(word).is_dir():
            ids.append(word)
        elif not files:
            raise ConformanceError(f"repro: got the folder {word!r} without *.json files, expected a folder of --save-failing")
        found = [case_id for file in files for case_id in _ids_of_file(file)]
        if files and not found:
            raise ConformanceError(f"repro: got {word}, without a case, expected ids of cases or a report with failures")
        ids += found
    return [Case.parse(case_id) for case_id in dict.fromkeys(ids)]


def _ids_of_file(path: Path) -> list[str]:
    """Return the ids in a saved case, a JSON report's failures, or the lines of a text file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConformanceError(f"repro: got {error}, expected a file of case ids") from error
    if not text.lstrip().startswith("{"):
        return [line.partition("#")[0].strip() for line in text.splitlines() if line.partition("#")[0].strip()]
    try:
        data = parse_json(text)
        return [data["case"]] if "case" in data else [failure["case"] for failure in data["failures"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConformanceError(f"repro: got {path}, without a case ({error}), expected one of --save-failing or --json") from error


def save_failing(folder: str, options: RunOptions, record: Record) -> Path:
    """Write a failing case and its outcome to a file named after it. Raises ConformanceError if the folder cannot be written."""
    assert record.outcome is not None
    digest = hashlib.blake2b(record.case.id.encode(), digest_size=4).hexdigest()
    path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', record.case.id)}.{digest}.json"
    data = {"schema": 1, "gemm": options.backend, "case": record.case.id, "repeat": command(options, [record.case.id])}
    write("save_failing", path, json_text(data | {"outcome": record.outcome.as_json()}))
    return path
