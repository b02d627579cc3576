"""What the conformance suite says of its mutants, and what torch.testing.assert_close says of them.

    export PYTHONPATH=tests:examples
    python benchmarks/mutants_table.py                       # prints the table; those in plain torch, on the CPU
    python benchmarks/mutants_table.py --device cuda --write # those that need a GPU too; puts the rows into docs/mutants.md

Each mutant is brought before every property at level smoke, and before the one that must reject it at level full too. For
assert_close it computes what a test of a GEMM usually has: operands without gaps, 128×128×128 and an odd size, N(0, 1) or U[0, 1),
compared with torch's own operation.
"""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from mutants.table import KINDS, MUTANTS, RIGHT, Mutant
from mutants.trial import cases_of, convicted, rejections
from usual_test import passes_usual_test

from gemmtune.conformance.bench.outcome import Outcome
from gemmtune.conformance.cases.scope import Level
from gemmtune.conformance.properties.table import PROPERTIES
from gemmtune.conformance.runs.isolation import InProcessRunner, IsolatedRunner, Runner

DOCUMENT = Path(__file__).parents[1] / "docs" / "mutants.md"
BEGIN, END = "<!-- mutants: made by benchmarks/mutants_table.py -->", "<!-- end of mutants -->"
HEAD = (
    "mutant", "bug", "rejected by", "diagnosis", "assert_close, N(0, 1)", "assert_close 0.1, N(0, 1)", "assert_close 0.1, U[0, 1)"
)  # fmt: skip
MOST_NAMED = 3
"""Properties that are named; the others are counted."""
CHOOSY = ("no_odd_k",)
"""Right GEMMs that refuse the odd size."""
USUAL = ((None, torch.randn), (0.1, torch.randn), (0.1, torch.rand))


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--only", default="", help="Part of a mutant's name.")
@click.option("--write", is_flag=True, help="Put the rows into docs/mutants.md; those that were not made now stay.")
def main(device: str, only: str, write: bool) -> None:
    """Make the table of mutants."""
    torch.set_num_threads(1)
    rows = rows_of(DOCUMENT.read_text()) if write and DOCUMENT.exists() else {}
    for mutant in MUTANTS:
        if only in mutant.name and mutant.cuda == (device == "cuda"):
            rows[mutant.name] = row(mutant)
            click.echo(_line(rows[mutant.name]))
    if write:
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(text.replace(f"{BEGIN}{_section(text)}{END}", "\n".join([BEGIN, *_lines(rows), END])))


def row(mutant: Mutant) -> list[str]:
    """The cells of one mutant."""
    device = "cuda" if mutant.cuda else "cpu"
    usual = [_word(passes_usual_test(mutant.target, device, tolerance, draw)) for tolerance, draw in USUAL]
    runner: Runner = IsolatedRunner(mutant.spec, device) if mutant.cuda else InProcessRunner(mutant.spec, device)
    try:
        outcomes = convicted(mutant, runner)
        names = [name for name in _rejecting(runner, device) if name != mutant.killed_by]
    finally:
        runner.close()
    named = [f"**{mutant.killed_by}**" if outcomes else "nothing", *names[: MOST_NAMED - 1]]
    more = f" and {len(names) - MOST_NAMED + 1} more" if len(names) >= MOST_NAMED else ""
    return [f"`{mutant.name}`", KINDS[mutant.kind], ", ".join(named) + more, _diagnosis(mutant, outcomes), *usual]


def _rejecting(runner: Runner, device: str) -> Iterator[str]:
    """The properties that have a bad outcome at level smoke."""
    traits = runner.describe().traits
    for judging in PROPERTIES:
        if next(rejections(runner, cases_of(judging, traits, device, (Level.SMOKE,)), most=1), None):
            yield judging.name


def _diagnosis(mutant: Mutant, outcomes: tuple[Outcome, ...]) -> str:
    texts = [failure.diagnosis or failure.message.splitlines()[0] for outcome in outcomes for failure in outcome.failures]
    wanted = collections.Counter(text for text in texts if mutant.diagnosis in text)
    return wanted.most_common(1)[0][0].replace("|", "\\|") if wanted else ""


def _word(passed: bool) -> str:
    return "passes" if passed else "fails"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _lines(rows: dict[str, Any]) -> list[str]:
    """The table, in the order of MUTANTS; one that was never made has empty cells."""
    empty = [""] * (len(HEAD) - 2)
    body = [rows.get(mutant.name, [f"`{mutant.name}`", KINDS[mutant.kind], *empty]) for mutant in MUTANTS]
    return [_line(list(HEAD)), "|" + "---|" * len(HEAD), *map(_line, body), "", _summary(body)]


def _summary(body: list[list[str]]) -> str:
    """How many mutants the last three columns let pass, and which right GEMMs the first of them would reject."""
    made = [cells for cells in body if cells[2]]
    counts = [sum(cells[i] == "passes" for cells in made) for i in range(-len(USUAL), 0)]
    tried = [right for right in RIGHT if right.name not in CHOOSY]
    rejected = [f"`{right.name}`" for right in tried if not passes_usual_test(right.target, "cpu", *USUAL[0])]
    text = (
        f"The ordinary tests of the last three columns let {counts[0]}, {counts[1]} and {counts[2]} of these {len(made)} mutants "
        f"pass. The first, with the defaults of assert_close, rejects {len(rejected)} of {len(tried)} right GEMMs: "
        f"{', '.join(rejected)}."
    )
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _section(text: str) -> str:
    return text.split(BEGIN)[1].split(END, maxsplit=1)[0]


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the document, by the mutant's name."""
    lines = [line for line in _section(text).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].strip("`"): row for row in cells}


if __name__ == "__main__":
    main()
