"""Naming a bug by reproducing it: a wrong result is compared with what each known bug would give from the same operands.

``BUGS`` is the table of those. What fits first is named; a bug that explains the wrong elements but would spoil others too is named
with the place to which it is confined. Where nothing fits, the map of errors is described, or nothing is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import addressing, epilogue, inputs, k_ranges, quantized, rounding
from .evidence import Evidence, View
from .match import Bug, fit
from .places import place
from .signs import errors_in, first_sign, last_sign

__all__ = ["BUGS", "Evidence", "diagnose"]

BUGS: tuple[Bug, ...] = (
    epilogue.missing,
    epilogue.scalars,
    epilogue.wrong_axis,
    epilogue.per_split,
    epilogue.scales,
    quantized.factors,
    quantized.weights,
    quantized.blocks,
    addressing.transposed,
    addressing.batches,
    addressing.misread,
    addressing.miswritten,
    k_ranges.k_ranges,
    addressing.clamped,
    addressing.unmasked,
    inputs.unsigned,
    quantized.clamped_pairs,
    inputs.narrowed,
    inputs.flushed,
    rounding.steps,
    rounding.partials,
    rounding.accumulators,
)
"""From what is certain and cheap to try to what is expensive."""


def diagnose(evidence: Evidence) -> str:
    """What the wrong result looks like, such as ``last K block of 16 dropped``; empty if like nothing known."""
    if evidence.problem.empty:
        return ""
    certain = first_sign(evidence)
    if certain:
        return certain
    with _one_thread():
        view = View(evidence)
        return _stale(evidence) or _reproduced(view, evidence) or _described(view, evidence)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small operations: on a busy machine several threads wait for each other, 20 times as long as one works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _described(view: View, evidence: Evidence) -> str:
    """What can be said of a result that no bug gives."""
    return rounding.overflow(view) or last_sign(evidence) or rounding.round_off(view) or errors_in(evidence)


def _stale(evidence: Evidence) -> str:
    """The result of an earlier call."""
    wrong = evidence.bad
    for earlier in evidence.earlier:
        same = (evidence.got == earlier) | (evidence.got.isnan() & earlier.isnan())
        if bool(same.all()) and int(wrong.sum()) > 1:
            return "the result of an earlier call"
    return ""


def _reproduced(view: View, evidence: Evidence) -> str:
    """The first bug that gives this result everywhere, else the first one that gives it where it is wrong."""
    confined = ""
    where = place(evidence.bad)
    for bug in BUGS:
        for suspect in bug(view):
            found = fit(view, suspect)
            if found is not None and found.everywhere:
                return suspect.text + (_as_well(view) if bug is epilogue.missing else "")
            if found is not None and where and not confined:
                confined = f"{suspect.text} in {where}"
    return confined


def _as_well(view: View) -> str:
    """Beside large numbers a narrow accumulator loses every small one: nothing is left either."""
    for suspect in rounding.accumulators(view):
        found = fit(view, suspect)
        if found is not None and found.everywhere:
            return f", which {suspect.text} gives as well"
    return ""
