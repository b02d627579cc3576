"""Parts of the documentation that are made of the code and of the results of benchmarks.

A page has such a part between ``<!-- made: NAME -->`` and ``<!-- end: NAME -->``. ``python docs/tables`` writes all of them;
``tests/unit/test_docs.py`` holds the pages to them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
ANY_OPERATION = "an [operation](operations.md)"
"""Value of an option or field that names an operation. Only their own pages list all of them."""
PART = re.compile(r"(<!-- made: (?P<name>[\w-]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table. A bar in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def shell(words: str) -> str:
    """Return a command on lines of at most 82 columns, broken before options; all but the last end with a backslash."""
    pairs = re.sub(r"(?<= )(--[\w-]+) (?=[^\s-]\S{,60}(?:\s|$))", "\\1\u00a0", words)
    lines = textwrap.wrap(pairs, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines).replace("\u00a0", " ")


def filled(text: str, makers: dict[str, Callable[[], str]]) -> str:
    """Return a page with each of its made parts as it has to be. Raises KeyError for a name that nothing makes."""
    return PART.sub(lambda found: f"{found[1]}\n{makers[found['name']]()}\n{found[3]}", text)
