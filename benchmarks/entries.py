"""Shapes to measure, with the names that their file gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gemmtune import Problem
from gemmtune.cli.shapes import problem_of_entry, why_skipped
from gemmtune.cli.spec import Spec
from gemmtune.errors import InvalidProblemError

__all__ = ["Entry", "read_entries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A problem and its name in the file, unique there."""

    name: str
    problem: Problem
    pattern: str = ""
    """How the blocks of a block-sparse weight lie, where that is not at random: ``banded``."""


def read_entries(path: str, device_type: str, names: str) -> tuple[list[Entry], list[str]]:
    """The entries whose name the regular expression ``names`` finds, and a line for each one that cannot be measured here."""
    data = json.loads(Path(path).read_text())
    options = Spec(device_type=device_type)
    found: list[Entry] = []
    skipped: list[str] = []
    for i, given in enumerate(data["shapes"] if isinstance(data, dict) else data):
        name = given.get("name", f"entry{i + 1}")
        if not re.search(names, name):
            continue
        reason = why_skipped(given, options)
        if reason:
            skipped.append(f"skipped {name}: {reason}")
        else:
            found.append(Entry(name=name, problem=_problem(given, f"{path}: {name}", options), pattern=given.get("pattern", "")))
    if not found:
        raise click.ClickException(f"--names {names!r} and --device {device_type} leave no shape of {path} to measure")
    repeated = {entry.name for entry in found if [e.name for e in found].count(entry.name) > 1}
    if repeated:
        raise click.ClickException(f"{path}: names must be unique, got {', '.join(sorted(repeated))} more than once")
    return found, skipped


def _problem(given: Mapping[str, Any], where: str, options: Spec) -> Problem:
    try:
        return problem_of_entry(given, where, options)
    except InvalidProblemError as error:
        raise click.ClickException(str(error)) from error
