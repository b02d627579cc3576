"""Rotation: the part of the cases that a run takes."""

from __future__ import annotations

import collections
import os
import subprocess
from pathlib import Path

import pytest
import rotation
from rotation import HEAVY, VARIABLE, choose, header, rotated, takes


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


def test_a_commit_takes_one_heavy_case_and_each_case_has_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    total, taken = sum(HEAVY.values()), collections.Counter[str]()
    for number in range(total):
        monkeypatch.setenv(VARIABLE, str(number))
        (one,) = (heavy for heavy in HEAVY if takes(heavy))
        taken[one] += 1
    assert taken == HEAVY


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
