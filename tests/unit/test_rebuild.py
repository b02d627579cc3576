"""Problems from their plain values, also from those of another version."""

from __future__ import annotations

import pytest
import torch

from gemmtune.errors import InvalidProblemError
from gemmtune.problem import Problem

PROBLEM = Problem.addmm(2, 3, 4, dtype=torch.float16, bias="mn", alpha=2, device_type="cpu")


def test_rebuilt_is_equal():
    assert Problem.from_json(PROBLEM.to_json()) == PROBLEM


@pytest.mark.parametrize("nothing", [None, False, ""])
def test_an_unknown_field_is_left_out_where_it_says_nothing(nothing):
    assert Problem.from_json(PROBLEM.to_json() | {"unheard_of": nothing}) == PROBLEM


def test_an_unknown_field_that_says_something_is_refused():
    with pytest.raises(InvalidProblemError, match="the field unheard_of = '2:4' is unknown to this version"):
        Problem.from_json(PROBLEM.to_json() | {"unheard_of": "2:4"})


def test_a_name_of_torch_that_is_no_dtype_is_refused():
    data = PROBLEM.to_json()
    with pytest.raises(ValueError, match="got 'matmul', expected the name of a dtype"):
        Problem.from_json(data | {"out": data["out"] | {"dtype": "matmul"}})
