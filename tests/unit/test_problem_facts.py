"""Facts of problems of every form.

``PYTHONPATH=tests:tests/unit python tests/unit/test_problem_facts.py`` writes problem_facts.json.

A store keeps problems by key and as JSON, and reads those of earlier versions. So a change of them is a decision. A digest covers
all properties of a problem and of its layouts, and the classes of its rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from many_problems import problems

from gemmtune.problem import Layout, Problem
from gemmtune.problem.operations import OPERATIONS
from gemmtune.problem.rows import RowClass, following_operands, row_classes

FILE = Path(__file__).with_name("problem_facts.json")
ROWS = (1, 8, 240, 4099)


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


def found() -> dict[str, str]:
    """Return the number of problems and the digest of their facts, by operation and dtype."""
    texts: dict[str, list[str]] = {}
    for name, problem in [*constructed(), *problems("cuda", 2)]:
        texts.setdefault(name, []).extend([*facts(problem), ""])
    return {
        name: f"{lines.count('')} problems, {hashlib.sha256(repr(lines).encode()).hexdigest()[:8]}" for name, lines in texts.items()
    }


def test_facts_of_problems_are_as_before() -> None:
    assert found() == json.loads(FILE.read_text()), "run this file as a script if the change is meant"


def test_a_problem_survives_json() -> None:
    for _, problem in problems("cpu", 1):
        made = Problem.from_json(json.loads(json.dumps(problem.to_json())))
        assert (made, made.key) == (problem, problem.key)


if __name__ == "__main__":
    FILE.write_text(json.dumps(found(), indent=1) + "\n")
