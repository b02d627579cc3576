"""Problems from their plain values, also for a package with other fields."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from gemmtune import problem as package
from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Layout, Precision, Problem
from gemmtune.problem.rebuild import rebuilt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Older:
    """A Problem without most fields."""

    op: str
    a: Layout
    b: Layout
    precision: Precision


OLDER = SimpleNamespace(Problem=Older, Layout=Layout, Precision=Precision)
PROBLEM = Problem.addmm(2, 3, 4, dtype=torch.float16, bias="mn", alpha=2, device_type="cpu")


def test_rebuilt_is_equal():
    assert rebuilt(PROBLEM.to_json(), package) == PROBLEM


def test_what_an_older_package_does_not_know_is_left_out_where_it_says_nothing():
    data = {
        name: value for name, value in PROBLEM.to_json().items() if name in ("op", "a", "b", "precision", "m", "n", "k", "batch")
    }
    older = rebuilt(data | {"prepacked": False, "inp": None}, OLDER)
    assert (older.op, older.a, older.precision) == ("addmm", PROBLEM.a, PROBLEM.precision)
    with pytest.raises(InvalidProblemError, match="the field prepacked = True is unknown to this version"):
        rebuilt(data | {"prepacked": True}, OLDER)
