"""Running single cases again: the commands that do it, files of failing cases, and what ``--repro`` reads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...errors import ConformanceError
from ..cases.case import Case
from ..option_table import OPTIONS
from ..options import RunOptions
from .files import json_text, write
from .record import Record

__all__ = ["cases_to_repeat", "command", "pytest_command", "save_failing"]

_KEPT = ("device", "trait", "traits", "in_process", "timeout", "sanitize")
"""Options without which the case would be another one."""


def command(options: RunOptions, words: Iterable[str], *, sanitize: bool = False) -> str:
    """The command that runs those cases alone, ``words`` as ``--repro`` takes them; under compute-sanitizer if that found it."""
    options = dataclasses.replace(options, sanitize=sanitize)
    return shlex.join(["gemmtune", "conformance", options.backend, *_given(options, pytest=False), *_repro("--repro", words)])


def pytest_command(options: RunOptions, words: Iterable[str], *, sanitize: bool = False) -> str:
    """The same with pytest."""
    options = dataclasses.replace(options, sanitize=sanitize)
    start = ["pytest", "-p", "gemmtune.conformance.plugin", "--pyargs", "gemmtune.conformance", f"--gemm-backend={options.backend}"]
    return shlex.join([*start, *_given(options, pytest=True), *_repro("--gemm-repro", words)])


def _repro(flag: str, words: Iterable[str]) -> Iterator[str]:
    for word in words:
        yield from (flag, word)


def _given(options: RunOptions, *, pytest: bool) -> Iterator[str]:
    given = options.given()
    for option in OPTIONS:
        if option.name not in _KEPT or option.name not in given:
            continue
        flag, value = option.pytest_spelling if pytest else option.spelling, given[option.name]
        if option.kind == "flag":
            yield flag
        else:
            for word in value if option.repeated else (value,):
                yield from (flag, f"{word:g}" if option.kind == "seconds" else str(word))


def cases_to_repeat(words: Sequence[str]) -> list[Case]:
    """The cases that ``--repro`` names: by id, in a file as ``@FILE``, or in the files of a folder; each once.

    Raises:
        CaseError: a text that is no case id.
        ConformanceError: a file that cannot be read, or has no case.
    """
    ids = [case_id for word in words for case_id in _ids(word)]
    return [Case.parse(case_id) for case_id in dict.fromkeys(ids)]


def _ids(word: str) -> list[str]:
    if word.startswith("@"):
        return _ids_of_file(Path(word[1:]))
    if not Path(word).is_dir():
        return [word]
    files = sorted(Path(word).glob("*.json"))
    if not files:
        raise ConformanceError(f"repro: got the folder {word!r}, which has no *.json, expected one of --save-failing")
    return [case_id for file in files for case_id in _ids_of_file(file)]


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
