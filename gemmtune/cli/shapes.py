"""Problems from the command line: ``MxNxK`` words, and files of shapes."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..errors import InvalidProblemError, raised_as
from ..foreign import parse_json, read_text, shown
from ..integration.recording import FORMAT as RECORDING
from ..operand_kinds import full_dtype_name
from ..problem import Problem
from ..selector.segments import rows_of
from . import words
from .output import note
from .product import KINDS, WHOLE, Kind
from .recording import recorded_problems
from .spec import TF32_ON_CPU, Spec
from .tunableop import entries_of, is_tunableop

LATER_OPS = ("scatter_mm", "bsr_scatter_mm")
"""Operations that files of shapes may name and that this version does not tune."""
OTHER_NAMES = {"b_dtype": "dtype_b"}
"""Alternative names of an entry's fields."""
DIGITS = 18
"""Most digits of a size, whose number then has 64 bits."""
NUMBER = f"[0-9]{{1,{DIGITS}}}"
RANGE = re.compile(f"(?:(?P<batch>{NUMBER})x)?(?P<lo>{NUMBER})\\.\\.(?P<hi>{NUMBER})(?P<rest>(?:x{NUMBER}){{2}})")
"""Shape with a range of M."""


def parse_rows(text: str, where: str = "--m") -> range:
    """Parse ``1..8192`` as a range of rows. Raises click.UsageError for any other text, an empty range, or M = 0."""
    found = re.fullmatch(f"({NUMBER})\\.\\.({NUMBER})", text)
    if found is None:
        raise click.UsageError(f"--m: got {text!r}, expected LO..HI with whole numbers, for instance 1..8192")
    with raised_as(click.UsageError, InvalidProblemError, before=f"{where} {text}: "):
        return rows_of((int(found[1]), int(found[2])))


def range_of_word(text: str, options: Spec) -> tuple[Problem, range] | None:
    """Return the problem and the range of M of a word such as ``1..8192x6144x4096``, or None for other shapes."""
    found = RANGE.fullmatch(text)
    if found is None:
        if ".." in text:
            raise click.UsageError(f"shape: got {text!r}, expected LO..HIxNxK or BxLO..HIxNxK, for instance 1..8192x6144x4096")
        return None
    rows = parse_rows(f"{found['lo']}..{found['hi']}", "shape: M of")
    batch = f"{found['batch']}x" if found["batch"] else ""
    return problem_of_word(f"{batch}{max(rows[-1], 2)}{found['rest']}", options), rows


def problem_of_word(text: str, options: Spec) -> Problem:
    """Return the problem that a word of the command line names. Raises click.UsageError if it names none."""
    with raised_as(click.UsageError, InvalidProblemError):
        return options.problem(parse_shape(text), f"shape {text}")


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse ``16x4096x4096`` as (16, 4096, 4096). Raises InvalidProblemError unless it is three or four whole numbers."""
    if not re.fullmatch(f"{NUMBER}(x{NUMBER}){{2,3}}", text):
        most = f" of at most {DIGITS} digits" if re.fullmatch(r"[0-9x]{19,}", text) else ""
        raise InvalidProblemError(
            f"shape: got {shown(text)}, expected MxNxK or BxMxNxK with whole numbers{most}, for instance 16x4096x4096"
        )
    return tuple(map(int, text.split("x")))


def problems_of(shapes: Sequence[str], shapes_file: str | None, spec: Spec) -> list[Problem]:
    """Return the problems of words and of a file, none if both are missing. Print the skipped entries.

    Raises click.UsageError for malformed or only skipped entries, and click.ClickException if the file cannot be read.
    """
    problems = [problem_of_word(text, spec) for text in shapes]
    if shapes_file is not None:
        with raised_as(click.UsageError, InvalidProblemError):
            found, skipped = problems_of_file(shapes_file, spec)
        for line in skipped:
            note(line)
        problems += found
    if not problems and shapes_file is not None:
        raise click.UsageError(f"--shapes: every entry of {shapes_file} was skipped, expected at least one that can be tuned here")
    return problems


def some_problems_of(shapes: Sequence[str], shapes_file: str | None, spec: Spec) -> list[Problem]:
    """Return ``problems_of``. Raises click.UsageError if there are no shapes."""
    if not shapes and shapes_file is None:
        raise click.UsageError("got no shapes, expected MxNxK or BxMxNxK, for instance 16x4096x4096, or --shapes FILE")
    return problems_of(shapes, shapes_file, spec)


def problems_of_file(path: str, options: Spec) -> tuple[list[Problem], list[str]]:
    """Return the problems of a file of shapes, and a line for each entry that this version or device cannot tune.

    The file holds a JSON list of entries, or an object with such a list as ``shapes``. An entry has ``m``, ``n`` and ``k``,
    and may have the other fields of ``FIELDS``. ``options`` give the rest. A file of torch's TunableOp is read too.

    Raises InvalidProblemError with the entry and the field if the file is malformed, and click.ClickException if it cannot be read.
    """
    problems: list[Problem] = []
    skipped: list[str] = []
    for index, (entry, refused) in enumerate(_entries(path)):
        name = entry.get("name") if isinstance(entry, dict) else None
        where = f"{path}: entry {index + 1}" + (f" ({name})" if name else "")
        if not isinstance(entry, dict):
            raise InvalidProblemError(f"{where}: got {_show(entry)}, expected an object with m, n and k")
        reason = refused or why_skipped(entry, options)
        if reason:
            skipped.append(f"skipped {where}: {reason}")
        else:
            problems.append(problem_of_entry(entry, where, options))
    return problems, skipped


def _entries(path: str) -> list[tuple[Any, str]]:
    """Return the entries of a file, each with the reason why it cannot be tuned, or ""."""
    try:
        text = read_text(path)
        if is_tunableop(text):
            return entries_of(text)
        data = parse_json(text)
    except OSError as error:
        raise click.ClickException(f"--shapes: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidProblemError(f"--shapes: {path} is not JSON, nor a file of TunableOp: {error}") from error
    entries = data.get("shapes") if isinstance(data, dict) else data
    if isinstance(data, dict) and data.get("format") == RECORDING:
        raise InvalidProblemError(f"--shapes: {path}: got a file of gemmtune record, expected shapes; tune it by --recorded {path}")
    if not isinstance(entries, list) or not entries:
        raise InvalidProblemError(
            f"--shapes: {path}: got {_show(data)}, expected a list of entries such as "
            '{"op": "mm", "m": 16, "n": 4096, "k": 4096}, or an object that has one as "shapes"'
        )
    return [(entry, "") for entry in entries]


def why_skipped(entry: Mapping[str, Any], options: Spec) -> str | None:
    """Return why a well-formed entry cannot be tuned here, or None."""
    if entry.get("op") in LATER_OPS:
        return f"{entry['op']} is not an operation of this version, which has {', '.join(words.OPS)}"
    if full_dtype_name(str(entry.get("dtype", options.dtype))) == "tf32" and options.device_type != "cuda":
        return TF32_ON_CPU
    return None


def problem_of_entry(entry: Mapping[str, Any], where: str, options: Spec) -> Problem:
    """Return the problem of an entry. Raises InvalidProblemError that begins with ``where`` for a malformed one."""
    for field, value in entry.items():
        if field not in FIELDS:
            raise InvalidProblemError(f"{where}: {field}: unknown field, expected {', '.join(FIELDS)}")
        if not FIELDS[field].check(value):
            raise InvalidProblemError(f"{where}: {field}: got {_show(value)}, expected {FIELDS[field].expected}")
    sizes = [field for field in ("batch", "m", "n", "k") if field != "batch" or "batch" in entry]
    for field in sizes:
        if field not in entry:
            raise InvalidProblemError(f"{where}: {field}: missing, expected a whole number")
    given = {field: value for field, value in entry.items() if field not in ("name", "batch", "m", "n", "k", "pattern")}
    given = {OTHER_NAMES.get(field, field): value for field, value in given.items()}
    return dataclasses.replace(options, **given).problem([entry[field] for field in sizes], where)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"


FIELDS: dict[str, Kind] = {
    "name": Kind(check=lambda value: isinstance(value, str), expected="a text"),
    "op": KINDS["op"],
    **dict.fromkeys(("batch", "m", "n", "k"), WHOLE),
    **KINDS,
    "b_dtype": KINDS["dtype_b"],
    "pattern": Kind(check=lambda value: value == "banded", expected="one of banded"),
}
"""Fields of an entry with the kinds of their values.

``b_dtype`` is another name of ``dtype_b``. ``pattern``, the places of a weight's blocks, is for benchmarks only: a problem
does not include it.
"""


def problems_and_ranges(
    spec: Spec, shapes: Sequence[str], shapes_file: str | None, recorded: str | None, m_range: str | None
) -> tuple[list[Problem], list[tuple[Problem, range]]]:
    """Return the problems to tune, and the problems whose M represents a range."""
    problems = recorded_problems(recorded, spec.device_type) if recorded is not None else []
    found = {word: range_of_word(word, spec) for word in shapes}
    ranges = [one for one in found.values() if one is not None]
    single = tuple(word for word, one in found.items() if one is None)
    if single or shapes_file is not None or (recorded is None and not ranges):
        problems += some_problems_of(single, shapes_file, spec)
    if m_range is None:
        return problems, ranges
    wanted = parse_rows(m_range)
    return [], [(problem, wanted) for problem in (*(problem for problem, _ in ranges), *problems)]
