"""tests/prose.py: what it counts, and what it leaves out."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module with another repository: one page and one module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    module = importlib.import_module("prose")
    for folder in ("docs", "gemmtune"):
        (tmp_path / folder).mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "docs/page.md"):
        (tmp_path / name).write_text("A short sentence.\n")
    (tmp_path / "gemmtune" / "module.py").write_text("")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_a_docstring_that_begins_as_no_sentence_is_counted(prose: ModuleType) -> None:
    (prose.ROOT / "gemmtune" / "module.py").write_text('def f():\n    """Of a block."""\n\n\ndef g():\n    """Return it."""\n')
    assert list(prose.fragments()) == ["gemmtune/module.py:1: Of a block."]


def test_sentences_of_prose_alone_are_counted(prose: ModuleType) -> None:
    long = " ".join(["word"] * 26)
    page = prose.ROOT / "docs" / "page.md"
    page.write_text(f"{long}.\n\n```sh\n{long}\n```\n\n| {long}, |\n|---|\n\n# {long}\n\n- one\n- two\n\n<!-- {long} -->\n")
    assert list(prose.long_sentences()) == [f"docs/page.md: {long}.", f"docs/page.md: {long},"]
    half = " ".join(["word"] * 13)
    page.write_text(f"- {half}\n- {half}\n\n{half}:\n\n| {half} | {half} |\n|---|---|\n| {half}; {half} |\n\n{half}\n")
    assert not list(prose.long_sentences())


def test_lines_that_can_be_broken_are_counted(prose: ModuleType) -> None:
    wide = "x" * 141
    (prose.ROOT / "docs" / "page.md").write_text(f"{wide}\n| {wide} |\n[text]({wide})\n")
    assert list(prose.long_lines()) == ["docs/page.md:1: 141 characters"]


def test_words_are_counted_in_comments_and_texts_and_not_in_names(prose: ModuleType) -> None:
    (prose.ROOT / "gemmtune" / "module.py").write_text('anchor = 1  # the anchor\ntext = f"the tails {name}"\n')
    assert [line.split(": ")[0] for line in prose.dialect()] == ["gemmtune/module.py:1", "gemmtune/module.py:2"]


def test_a_count_above_its_limit_fails(prose: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0
    (prose.ROOT / "README.md").write_text("x" * 141 + "\n" + ("y" * 141 + "\n") * prose.LIMITS["lines of more than 140 characters"])
    assert prose.main([]) == 1
    assert "TOO MANY" in capsys.readouterr().out
