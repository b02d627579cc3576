"""Rotation: the part of the cases that a run takes."""

from __future__ import annotations

import collections
import os
import subprocess
from pathlib import Path

import pytest
import rotation
from rotation import HEAVY, VARIABLE, WHOLE, WITHOUT_HEAVY, choose, header, rotated, takes

pytest_plugins = ["pytester"]


def test_the_parts_cover_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in range(100, 104):
        monkeypatch.setenv(VARIABLE, str(number))
        found += rotated(range(10), 4, "strides")
    assert sorted(found) == list(range(10))


def test_names_start_at_different_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    assert len({rotated(range(12), 12, name)[0] for name in ("bound", "edges", "nan", "scales", "batch", "out")}) > 1


def test_parts_of_two_lists_meet_in_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set()
    for number in range(40):
        monkeypatch.setenv(VARIABLE, str(number))
        met.add((rotated("ab", 2, "layouts"), rotated("cd", 2, "dtypes")))
    assert len(met) == 4


def test_a_part_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        monkeypatch.setenv(VARIABLE, str(number))
        assert len(rotated([1, 2], 12)) == 1


def test_a_commit_takes_one_heavy_case_at_most_and_each_case_has_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = collections.Counter[str]()
    for number in range(sum(HEAVY.values()) + WITHOUT_HEAVY):
        monkeypatch.setenv(VARIABLE, str(number))
        found = [heavy for heavy in HEAVY if takes(heavy)]
        assert len(found) <= 1
        taken.update(found)
    assert taken == HEAVY


def test_a_run_of_all_cases_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, WHOLE)
    assert rotated([1, 2, 3], 3, "any") == [1, 2, 3]
    assert all(takes(heavy) for heavy in HEAVY)
    assert rotation.number() == 0


MARKED = """
import pytest

@pytest.mark.rotates(3)
@pytest.mark.parametrize("i", range(6))
def test_some(i): pass

@pytest.mark.rotates(3)
def test_one(): pass

@pytest.mark.turn(1, 3)
def test_in_turn(): pass

@pytest.mark.parametrize("i", range(4))
def test_all(i): pass
"""
PLUGIN = """
import pytest
from parallel import pytest_collection_modifyitems

def pytest_configure(config):
    config.addinivalue_line("markers", "rotates(every): part")
    config.addinivalue_line("markers", "turn(number, every): whole")
    config.addinivalue_line("markers", "gpu: GPU")
"""


def collected(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """Return the ids of the collected tests."""
    done = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *arguments)
    return [line.partition("::")[2] for line in done.outlines if "::" in line]


def test_marked_tests_keep_a_part_of_their_cases(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(MARKED)
    found: list[str] = []
    for turn in range(3):
        monkeypatch.setenv(VARIABLE, str(turn))
        names = collected(pytester, "-m", "not gpu")
        assert len(names) == 2 + 1 + (turn == 1) + 4, "a third of the cases, at least one, and all of a test without the mark"
        assert ("test_in_turn" in names) == (turn == 1)
        found += [name for name in names if name.startswith("test_some")]
    assert sorted(found) == [f"test_some[{i}]" for i in range(6)]


def test_a_file_keeps_a_test(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile("import pytest\n@pytest.mark.turn(1, 3)\n@pytest.mark.parametrize('i', [0, 1])\ndef test(i): pass")
    for number, count in (0, 1), (1, 2), (2, 1):
        monkeypatch.setenv(VARIABLE, str(number))
        assert len(collected(pytester, "-m", "not gpu")) == count


@pytest.mark.parametrize(
    ("turn", "arguments", "count"),
    [
        (WHOLE, ("-m", "not gpu"), 12),
        ("1", ("-m", "rotates"), 7),
        ("1", ("-m", "not gpu", "-k", "test_some"), 6),
        ("1", ("-m", "not gpu", "test_marked.py::test_some"), 6),
    ],
    ids=["whole", "marker", "keyword", "name"],
)
def test_who_names_tests_gets_all_their_cases(
    turn: str, arguments: tuple[str, ...], count: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, turn)
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(test_marked=MARKED)
    assert len(collected(pytester, *arguments)) == count


def test_the_number_comes_from_the_commit_and_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, stdout="00001ff0c0ffee\n"))
    monkeypatch.delenv("PYTHONHASHSEED")
    choose()
    assert os.environ["PYTHONHASHSEED"] == "511"
    assert header() == "rotation: 511 (of the commit; TEST_ROTATION=511 repeats it)"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a number that is given stays"))
    choose()


def test_the_number_is_0_without_a_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(rotation, "__file__", str(tmp_path / "rotation.py"))
    choose()
    assert header().startswith("rotation: 0 ")
