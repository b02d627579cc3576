"""Tables that ``python docs/tables`` writes into the pages from the code and the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import PAGES, makers

FILLED, MAKERS = makers()


TURNS = {"report.md": pytest.mark.turn(6, 8)}
"""Pages whose tables take seconds. Continuous integration compares all of them by ``docs/tables --check`` too."""


@pytest.mark.rotates(8)
@pytest.mark.parametrize("page", [pytest.param(page, marks=TURNS.get(page.name, ()), id=page.name) for page in PAGES])
def test_the_made_parts_of_a_page_are_those_of_the_code_and_the_results(page: Path) -> None:
    """``python docs/tables`` writes them."""
    text = page.read_text(encoding="utf-8")
    assert FILLED(text, MAKERS) == text


def test_every_made_part_stands_on_a_page() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"<!-- made: ([\w-]+) -->", texts)) == set(MAKERS)
