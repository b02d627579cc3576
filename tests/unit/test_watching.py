"""The record of plain values that functions of the package return."""

from __future__ import annotations

import torch
from watching import watching

from gemmtune.backends.triton import rank
from gemmtune.numerics import bounds


def test_functions_of_the_named_rooms_are_watched_for_a_while() -> None:
    before = rank._smooth_max, bounds.underflow
    with watching("backends.triton") as watched:
        assert list(watched.taken()) == []
        rank._smooth_max(1.0, 2.0)
        rank._smooth_max(1.0, 3.0)
        bounds.underflow(torch.float32, flush=True)
        [first] = watched.taken()
        rank._smooth_max(1.0, 2.0)
        [second] = watched.taken()
        assert list(watched.taken()) == []
    name = "gemmtune.backends.triton.rank._smooth_max"
    assert (first.partition(",")[0], second.partition(",")[0]) == (f"{name}: 2", f"{name}: 1")
    assert first.partition(",")[2] != second.partition(",")[2]
    assert (rank._smooth_max, bounds.underflow) == before


def test_other_kinds_of_results_may_be_left_out() -> None:
    with watching("backends.triton", kinds=frozenset({"int"})) as watched:
        rank._smooth_max(1.0, 2.0)
        assert list(watched.taken()) == []
