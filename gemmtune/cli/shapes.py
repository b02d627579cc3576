"""Problems from the command line: ``MxNxK`` words, and files of shapes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import click
import torch

from ..errors import InvalidProblemError
from ..problem import Precision, Problem, precision_of
from ..problem.dtypes import parse_dtype
from ..problem.problem import DENSE_OPS, BiasShape
from .output import note

__all__ = ["BIASES", "DTYPES", "LAYOUTS", "Skipped", "Spec", "parse_shape", "problem_of_word", "problems_of", "problems_of_file"]

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")
LAYOUTS = ("nn", "nt", "tn", "tt")
BIASES: tuple[BiasShape, ...] = get_args(BiasShape)
LATER_OPS = ("int_mm", "int_mm_mul", "mixed_mm", "scaled_mm", "bsr_addmm")
"""Operations that files of shapes may name and that this version does not tune."""
TF32_ON_CPU = "tf32 is a precision of CUDA devices; use --device cuda, or float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the options say of every shape; a shape adds its sizes. None means: as the shape suggests."""

    op: str | None = None
    dtype: str = "bfloat16"
    layout: str = "nt"
    bias: str | None = None
    alpha: float = 1.0
    beta: float | None = None
    prepacked: bool = False
    device_type: str = "cpu"

    def problem(self, sizes: Sequence[int], where: str) -> Problem:
        """The problem of sizes (M, N, K) or (B, M, N, K); ``where`` begins the message of an error.

        Raises:
            InvalidProblemError: the sizes and the options do not make one problem.
        """
        batched = len(sizes) == 4
        op = self.op or self._implied_op(batched)
        if op not in DENSE_OPS:
            raise InvalidProblemError(f"{where}: op: got {op!r}, expected one of {', '.join(DENSE_OPS)}")
        if (op in ("bmm", "baddbmm")) != batched:
            form = "BxMxNxK" if op in ("bmm", "baddbmm") else "MxNxK"
            raise InvalidProblemError(f"{where}: got {len(sizes)} sizes for {op}, expected {form}")
        if op in ("mm", "bmm"):
            self._refuse("bias, alpha and beta", self.bias is not None or self.alpha != 1 or self.beta is not None, op, where)
        if batched:
            self._refuse("prepacked", self.prepacked, op, where)
        options: dict[str, Any] = {"layout": self.layout, "device_type": self.device_type} | self._dtype_options(where)
        if op in ("addmm", "baddbmm"):
            options |= {"alpha": self.alpha, "beta": 1.0 if self.beta is None else self.beta}
            options |= {"bias": self.bias} if self.bias is not None else {}
        if not batched:
            options["prepacked"] = self.prepacked
        return cast(Problem, getattr(Problem, op)(*sizes, **options))

    def _implied_op(self, batched: bool) -> str:
        added = self.bias is not None or self.alpha != 1 or self.beta is not None
        return {(False, False): "mm", (False, True): "addmm", (True, False): "bmm", (True, True): "baddbmm"}[batched, added]

    def _refuse(self, what: str, given: bool, op: str, where: str) -> None:
        if given:
            raise InvalidProblemError(f"{where}: {what}: not for {op}, expected one of {_takers(what)}")

    def _dtype_options(self, where: str) -> dict[str, Any]:
        if self.dtype == "tf32":
            if self.device_type != "cuda":
                raise InvalidProblemError(f"{where}: {TF32_ON_CPU}")
            return {"dtype": torch.float32, "precision": Precision(input_mode="tf32")}
        dtype = parse_dtype(self.dtype)
        return {"dtype": dtype, "precision": precision_of(dtype, self.device_type)}


def _takers(what: str) -> str:
    return "mm, addmm" if what == "prepacked" else "addmm, baddbmm"


def problem_of_word(text: str, options: Spec) -> Problem:
    """The problem that a word of the command line names. Raises click.UsageError if it names none."""
    try:
        return options.problem(parse_shape(text), f"shape {text}")
    except InvalidProblemError as error:
        raise click.UsageError(str(error)) from error


def parse_shape(text: str) -> tuple[int, ...]:
    """``16x4096x4096`` as (16, 4096, 4096). Raises InvalidProblemError for anything but three or four whole numbers."""
    if not re.fullmatch(r"\d+(x\d+){2,3}", text):
        raise InvalidProblemError(f"shape: got {text!r}, expected MxNxK or BxMxNxK with whole numbers, for instance 16x4096x4096")
    return tuple(map(int, text.split("x")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An entry of a file that is well-formed but cannot be tuned here."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.where}: {self.reason}"


def problems_of(shapes: Sequence[str], shapes_file: str | None, spec: Spec) -> list[Problem]:
    """The problems of words and of a file; what is skipped of the file is noted.

    Raises:
        click.UsageError: there are none, or a word is malformed.
        InvalidProblemError: the file is malformed.
    """
    if not shapes and shapes_file is None:
        raise click.UsageError("got no shapes, expected MxNxK or BxMxNxK, for instance 16x4096x4096, or --shapes FILE")
    problems = [problem_of_word(text, spec) for text in shapes]
    if shapes_file is not None:
        found, skipped = problems_of_file(shapes_file, spec)
        for entry in skipped:
            note(str(entry))
        problems += found
    if not problems:
        raise click.UsageError(f"--shapes: every entry of {shapes_file} was skipped: nothing is left to do")
    return problems


def problems_of_file(path: str, options: Spec) -> tuple[list[Problem], list[Skipped]]:
    """The problems of a file of shapes, and what was skipped because this version or device cannot do it.

    The file holds a JSON list of entries, or an object with such a list as ``shapes``. An entry has ``m``, ``n`` and ``k``, and may
    have ``op``, ``batch``, ``dtype``, ``layout``, ``bias``, ``alpha``, ``beta``, ``prepacked`` and ``name``; ``options`` give the
    rest.

    Raises:
        InvalidProblemError: the file or an entry is malformed; the message names the entry and the field.
    """
    problems: list[Problem] = []
    skipped: list[Skipped] = []
    for index, entry in enumerate(_entries(path)):
        where = _where(path, index, entry)
        if not isinstance(entry, dict):
            raise InvalidProblemError(f"{where}: got {_show(entry)}, expected an object with m, n and k")
        reason = _reason_to_skip(entry, options)
        if reason is not None:
            skipped.append(Skipped(where=where, reason=reason))
        else:
            problems.append(_problem_of(entry, where, options))
    return problems, skipped


def _entries(path: str) -> list[Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidProblemError(f"--shapes: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidProblemError(f"--shapes: {path} is not JSON: {error}") from error
    entries = data.get("shapes") if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries:
        raise InvalidProblemError(
            f"--shapes: {path}: got {_show(data)}, expected a list of entries such as "
            '{"op": "mm", "m": 16, "n": 4096, "k": 4096}, or an object that has one as "shapes"'
        )
    return entries


def _where(path: str, index: int, entry: Any) -> str:
    name = entry.get("name") if isinstance(entry, dict) else None
    return f"{path}: entry {index + 1}" + (f" ({name})" if name else "")


def _reason_to_skip(entry: Mapping[str, Any], options: Spec) -> str | None:
    if entry.get("op") in LATER_OPS:
        return f"{entry['op']} is not an operation of this version, which has {', '.join(DENSE_OPS)}"
    if entry.get("dtype", options.dtype) == "tf32" and options.device_type != "cuda":
        return TF32_ON_CPU
    return None


def _problem_of(entry: Mapping[str, Any], where: str, options: Spec) -> Problem:
    for field, value in entry.items():
        if field not in FIELDS:
            raise InvalidProblemError(f"{where}: {field}: unknown field, expected {', '.join(FIELDS)}")
        check, expected = FIELDS[field]
        if not check(value):
            raise InvalidProblemError(f"{where}: {field}: got {_show(value)}, expected {expected}")
    sizes = [field for field in ("batch", "m", "n", "k") if field != "batch" or "batch" in entry]
    for field in sizes:
        if field not in entry:
            raise InvalidProblemError(f"{where}: {field}: missing, expected a whole number")
    given = {field: value for field, value in entry.items() if field not in ("name", "batch", "m", "n", "k")}
    return dataclasses.replace(options, **given).problem([entry[field] for field in sizes], where)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_of(*legal: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in legal, "one of " + ", ".join(legal))


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str), "a text"),
    "op": _one_of(*DENSE_OPS),
    "batch": (_whole, "a whole number"),
    "m": (_whole, "a whole number"),
    "n": (_whole, "a whole number"),
    "k": (_whole, "a whole number"),
    "dtype": _one_of(*DTYPES),
    "layout": _one_of(*LAYOUTS),
    "bias": _one_of(*BIASES),
    "alpha": (_number, "a number"),
    "beta": (_number, "a number"),
    "prepacked": (lambda value: isinstance(value, bool), "true or false"),
}
"""Field of an entry to the check of its value and what the check expects."""
