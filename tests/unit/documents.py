"""What pages have in them: blocks of code, what they print, tables, and commands."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>gpu|needs|slow)\b:?(?P<rest>[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^ *```$(?:\n\n^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of code of a page: its language, the text, what it prints, and what it needs.

    ``mark`` is ``gpu``, ``needs`` (packages, in ``rest``), ``slow`` or empty: ``<!-- gpu: 16 GB -->`` above a block.
    """

    page: Path
    language: str
    text: str
    printed: str | None
    mark: str = ""
    rest: str = ""


def blocks(page: Path, language: str) -> list[Block]:
    """Return the blocks of a page in a language."""
    return [
        Block(
            page=page,
            language=language,
            text=found["text"],
            printed=found["printed"],
            mark=found["mark"] or "",
            rest=found["rest"] or "",
        )
        for found in FENCE.finditer(page.read_text(encoding="utf-8"))
        if found["language"] == language
    ]


def section(path: Path, title: str) -> str:
    """Return the text below a heading, up to the next one."""
    return path.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """Return the rows of the first table in a text, without its head."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows][2:]


def makers() -> tuple[Callable[..., str], dict[str, Callable[[], str]]]:
    """Return ``filled`` and ``MAKERS`` of docs/tables."""
    sys.path.insert(0, str(DOCS))
    try:
        from tables import filled
        from tables.makers import MAKERS
    finally:
        sys.path.remove(str(DOCS))
    return filled, MAKERS


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in blocks of shell, of a session, and in steps of a workflow."""
    for block in blocks(page, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield from _words(line)
    for block in blocks(page, "console"):
        for line in block.text.splitlines():
            yield from _words(line.removeprefix("$ "))
    for block in blocks(page, "yaml"):
        for line in re.findall(r"- run: (.*)", block.text):
            for part in line.split(" && "):
                yield from _words(part)


def _words(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        yield ["environment", words.pop(0)]
    if words:
        yield [words[0].removeprefix(".venv/bin/"), *words[1:]]
