"""Tables that ``python docs/tables`` writes into the pages from the code and the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import PAGES, makers

FILLED, MAKERS = makers()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_made_parts_of_a_page_are_those_of_the_code_and_the_results(page: Path) -> None:
    """``python docs/tables`` writes them."""
    text = page.read_text(encoding="utf-8")
    assert FILLED(text, MAKERS) == text


def test_every_made_part_stands_on_a_page() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"<!-- made: ([\w-]+) -->", texts)) == set(MAKERS)
