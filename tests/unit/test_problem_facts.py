"""Facts of problems of every form.

``PYTHONPATH=tests:tests/unit python tests/unit/test_problem_facts.py`` writes problem_facts.json.

A store keeps problems by key and as JSON, and reads those of earlier versions. So a change of them is a decision. A digest covers
all properties of a problem and of its layouts, the classes of its rows, and the plain values of all functions of the room.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from many_problems import problems
from watching import watching

from gemmtune.problem import Layout, Problem
from gemmtune.problem.operations import OPERATIONS, ROLES
from gemmtune.problem.rows import RowClass, following_operands, row_classes

FILE = Path(__file__).with_name("problem_facts.json")
ROWS = (1, 8, 240, 4099)
DTYPES = (torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8, torch.float64, torch.int32, torch.bool, torch.complex64)
OPTIONS: dict[str, tuple[object, ...]] = {
    "op": ("mm", "addmm", "bmm", "scaled_mm", "mixed_mm", "grouped_mm", "grouped_k_mm", "int_mm", "bsr_mm", "mm_plus_mm", "?"),
    "fast_accum": (True,), "device_type": ("cpu", "cuda", "mps"), "prepacked": (True, False),
    "encoding": ("int4", "", "uint4", "other"),
    "gated": ("silu", "", "other"), "alpha": ("one", "general", "zero", "other"), "beta": ("general", "zero", "other"),
}  # fmt: skip
"""Values of fields that are given to problems in turn, whatever they are."""


def properties(value: object) -> str:
    """Return the properties and derived fields of an object that are plain data, with their values."""
    kinds = [vars(kind) for kind in type(value).__mro__]
    derived = {field.name for field in dataclasses.fields(value) if not field.init}  # type: ignore[arg-type]
    names = sorted(derived | {name for kind in kinds for name, x in kind.items() if isinstance(x, property)} - {"operation", "key"})
    return " ".join(f"{name}={_value(value, name)}" for name in names)


def _value(value: object, name: str) -> object:
    try:
        return getattr(value, name)
    except Exception as error:  # noqa: BLE001 - some properties are of one kind of problem only
        return type(error).__name__


def constructed() -> Iterator[tuple[str, Problem]]:
    """Yield what the constructors make of sizes alone."""
    for name in OPERATIONS:
        make = getattr(Problem, name)
        given = inspect.signature(make).parameters.values()
        count = sum(x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD for x in given)
        yield "constructors", make(*(3, 64, 128, 256)[-count:], device_type="cuda")


def facts(problem: Problem) -> Iterator[str]:
    """Yield all facts of a problem."""
    yield f"{problem} {problem.key} {json.dumps(problem.to_json(), sort_keys=True)} {properties(problem)}"
    for name, layout in problem.operands:
        assert isinstance(layout, Layout)
        yield f"{name} {layout} {layout.transposed if len(layout.size) > 1 else ''} {properties(layout)}"
        if name.startswith(("scale", "zero")):
            yield str(problem.scale_block(name))
    for rows_class in row_classes(problem):
        yield f"{rows_class} {following_operands(rows_class)} {properties(rows_class)} {rows_class.within(range(5, 99))}"
        yield from (str(at) for at in _at(rows_class))


def _at(rows_class: RowClass) -> Iterator[Problem]:
    return (rows_class.at(m) for m in ROWS if rows_class.has(m))


def refusals(problem: Problem, number: int) -> Iterator[str]:
    """Yield what is said about the problem with one operand changed or absent, and with one other option, in turn."""
    for turn, (name, layout) in enumerate(problem.operands):
        assert isinstance(layout, Layout)
        longer = tuple(size + (i == number % len(layout.size)) for i, size in enumerate(layout.size)) if layout.size else (2,)
        changes = (
            {"size": longer, "stride": layout.stride or (1,)}, {"dtype": DTYPES[(number + turn) % len(DTYPES)]},
            {"stride": layout.stride[::-1]}, {"stride": (0,) * len(layout.size)},
            {"size": (*layout.size, 1), "stride": (*layout.stride, 1)},
        )  # fmt: skip
        for change in changes:
            yield _said(problem, name, dataclasses.replace(layout, **change))  # type: ignore[arg-type]
        yield _said(problem, name, None)
    for name, values in OPTIONS.items():
        yield _said(problem, name, values[number % len(values)])
    for name in sorted({*ROLES} - {name for name, _ in problem.operands}):
        yield f"{name}: {_said(problem, name, problem.out)}"


def _said(problem: Problem, name: str, value: object) -> str:
    try:
        changed = dataclasses.replace(problem, **{name: value})  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - an absent operand may be any error
        return f"{type(error).__name__}: {error}"
    return str(changed)


def found() -> dict[str, str]:
    """Return the number of problems and the digest of their facts, by operation and dtype."""
    texts: dict[str, list[str]] = {}
    with watching("problem") as watched:
        for number, (name, problem) in enumerate([*constructed(), *problems("cuda", 2)]):
            texts.setdefault(name, []).extend([*facts(problem), *refusals(problem, number), *watched.taken(), ""])
    return {
        name: f"{lines.count('')} problems, {hashlib.sha256(repr(lines).encode()).hexdigest()[:8]}" for name, lines in texts.items()
    }


@pytest.mark.turn(1, 2)
def test_facts_of_problems_are_as_before() -> None:
    assert found() == json.loads(FILE.read_text()), "run this file as a script if the change is meant"


def test_a_problem_survives_json() -> None:
    for _, problem in problems("cpu", 1):
        made = Problem.from_json(json.loads(json.dumps(problem.to_json())))
        assert (made, made.key) == (problem, problem.key)


if __name__ == "__main__":
    FILE.write_text(json.dumps(found(), indent=1) + "\n")
