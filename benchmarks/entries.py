"""Shapes to measure, with the names that their file gives them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gemmtune import Problem
from gemmtune.cli.shapes import FIELDS, Spec
from gemmtune.problem.problem import DENSE_OPS

__all__ = ["Entry", "read_entries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A problem and its name in the file, unique there."""

    name: str
    problem: Problem


def read_entries(path: str, device_type: str, names: str) -> tuple[list[Entry], list[str]]:
    """The entries whose name the regular expression ``names`` finds, and a line for each one that cannot be measured here."""
    data = json.loads(Path(path).read_text())
    found: list[Entry] = []
    skipped: list[str] = []
    for i, given in enumerate(data["shapes"] if isinstance(data, dict) else data):
        name = given.get("name", f"entry{i + 1}")
        if not re.search(names, name):
            continue
        reason = _reason_to_skip(given, device_type)
        if reason:
            skipped.append(f"skipped {name}: {reason}")
        else:
            found.append(Entry(name=name, problem=_problem(given, f"{path}: {name}", device_type)))
    if not found:
        raise click.ClickException(f"--names {names!r} and --device {device_type} leave no shape of {path} to measure")
    repeated = {entry.name for entry in found if [e.name for e in found].count(entry.name) > 1}
    if repeated:
        raise click.ClickException(f"{path}: names must be unique, got {', '.join(sorted(repeated))} more than once")
    return found, skipped


def _reason_to_skip(given: Mapping[str, Any], device_type: str) -> str | None:
    if given["op"] not in DENSE_OPS:
        return f"{given['op']} is not among the operations {', '.join(DENSE_OPS)}"
    if given["dtype"] == "tf32" and device_type != "cuda":
        return "tf32 is a precision of CUDA devices"
    return None


def _problem(given: Mapping[str, Any], where: str, device_type: str) -> Problem:
    unknown = set(given) - set(FIELDS)
    if unknown:
        raise click.ClickException(f"{where}: unknown field {', '.join(sorted(unknown))}, expected {', '.join(FIELDS)}")
    sizes = [given[field] for field in ("batch", "m", "n", "k") if field in given]
    options = {field: value for field, value in given.items() if field not in ("name", "batch", "m", "n", "k")}
    return dataclasses.replace(Spec(device_type=device_type), **options).problem(sizes, where)
