"""Count what makes docstrings and pages hard to read, and fail above the limits: ``python tests/prose.py``.

Counted are docstrings that are no sentence, long sentences and long lines of pages, and words for which the field has others.
``LIMITS`` is lowered when a count falls, and never raised.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "docstrings that are no sentence": 0,
    "sentences of more than 25 words": 0,
    "lines of more than 140 characters": 2,
    "words with a better one": 1,
}
MOST_WORDS, MOST_CHARACTERS = 25, 140
MOST_PLACES = 20
"""Places that are printed above a limit without ``-v``."""
FRAGMENTS = {
    "Of", "Its", "For", "In", "On", "At", "By", "To", "From", "With", "Where", "Such", "As", "What", "Whether", "Which", "Those",
    "Who", "Why", "How",
}  # fmt: skip
"""First words of a docstring that is not a sentence."""
DIALECT = {
    "told": "logged, reported", "turned": "transposed", "hand-over": "crossover", "by itself": "in isolation",
    "by themselves": "in isolation", "what is left": "remaining", "meanwhile": "concurrently", "anchor": "sampled M",
    "anchors": "sampled Ms", "tails": "epilogue match", "joins": "horizontal fusion",
}  # fmt: skip
"""Words that mean something else to a stranger, and what the field says."""


def pages() -> list[Path]:
    """Return the pages that users read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def sources() -> list[Path]:
    """Return the modules of the package."""
    return sorted((ROOT / "gemmtune").rglob("*.py"))


def fragments() -> Iterator[str]:
    """Yield docstrings of functions and classes that begin as no sentence does."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                if text.split(" ")[0] in FRAGMENTS:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and cells of tables, without code, comments and headings."""
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    cells = [re.sub(r"\s*\|\s*|;\s", "\n\n", line) if line.startswith("|") else line for line in prose.splitlines()]
    kept = ["" if line.startswith(("#", ":::", "--8<--")) else line for line in cells]
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", "\n".join(kept)):
        if block.strip():
            yield " ".join(block.split())


def long_sentences() -> Iterator[str]:
    """Yield sentences of pages with too many words."""
    for page in pages():
        for paragraph in paragraphs(page.read_text(encoding="utf-8")):
            for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
                if len(sentence.split()) > MOST_WORDS:
                    yield f"{page.relative_to(ROOT)}: {sentence}"


def long_lines() -> Iterator[str]:
    """Yield lines of pages that are too long. Rows of tables and links cannot be broken."""
    for page in pages():
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MOST_CHARACTERS and not line.startswith("|") and "](" not in line:
                yield f"{page.relative_to(ROOT)}:{number}: {len(line)} characters"


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of prose: of a page all, of a module comments and texts."""
    if path.suffix == ".md":
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
                yield from enumerate(token.string.splitlines(), token.start[0])


def dialect() -> Iterator[str]:
    """Yield places of words that have a better one, in pages and in comments and texts of the package."""
    words = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in sorted(DIALECT, key=len, reverse=True)))
    for path in [*pages(), *sources()]:
        for number, line in prose_of(path):
            for found in words.findall(line):
                yield f"{path.relative_to(ROOT)}:{number}: {found!r}, say {DIALECT[found]}"


def main(arguments: list[str]) -> int:
    """Print the counts and, with ``-v`` or above a limit, the places. Return 1 if a count is above its limit."""
    checks = (fragments, long_sentences, long_lines, dialect)
    failed = False
    for (name, limit), check in zip(LIMITS.items(), checks, strict=True):
        found = list(check())
        over = len(found) > limit
        failed |= over
        print(f"{len(found):4} of at most {limit:4}  {name}{'  TOO MANY' if over else ''}")
        if over or "-v" in arguments:
            print("\n".join(f"        {place}" for place in found[: None if "-v" in arguments else MOST_PLACES]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
