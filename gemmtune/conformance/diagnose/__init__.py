"""Naming a bug by reproducing it: a wrong result is compared with what each known bug would give from the same operands.

``BUGS`` is the table of those. What fits first is named, and what fits as well is noted, since a case may be too small to tell two
bugs apart that another one tells apart. A bug that explains the wrong elements but would spoil others too is named with the place
to which it is confined. Where nothing fits, the map of errors is described, or nothing is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import addressing, epilogue, k_ranges, quantized, rounding
from .evidence import Evidence, View
from .match import DIFFERS, FIRST_CALL, WRONG_DTYPE, Bug, Diagnosis, fitting, kind_of
from .signs import errors_in, first_sign, last_sign, place

__all__ = ["BUGS", "DIFFERS", "FIRST_CALL", "WRONG_DTYPE", "Diagnosis", "Evidence", "diagnose", "kind_of"]

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
    rounding.unsigned,
    quantized.clamped_pairs,
    rounding.narrowed,
    rounding.flushed,
    rounding.steps,
    rounding.partials,
    rounding.accumulators,
)
"""The known bugs, from what is certain and cheap to try to what is expensive."""
COSTLY = (rounding.steps, rounding.partials, rounding.accumulators)
"""Bugs that are tried only where no other gives the result."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """What the wrong result looks like, such as ``last K block of 16 dropped``; without a text if like nothing known."""
    if evidence.problem.empty:
        return Diagnosis()
    certain = first_sign(evidence)
    if certain and bool((evidence.unwritten & evidence.bad).any()):
        return Diagnosis(certain)
    with _one_thread():
        view = View(evidence)
        everywhere, confined, possible = _reproduced(view, evidence)
        text = certain or next(iter(everywhere), "") or confined
        # What can be said of a result that no bug gives.
        text = text or rounding.overflow(view) or last_sign(evidence) or rounding.round_off(view) or errors_in(evidence)
    return Diagnosis(text, tuple(dict.fromkeys(other for other in (*everywhere, *possible) if other != text)))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small operations: on a busy machine several threads wait for each other, 20 times as long as one works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _reproduced(view: View, evidence: Evidence) -> tuple[list[str], str, list[str]]:
    """The bugs that give this result everywhere; the first one that gives it where it is wrong, with the place; and those that
    would give it too, but of which it says too little."""
    everywhere: list[str] = []
    possible: list[str] = []
    confined = ""
    where = place(evidence.bad)
    # All that is wrong is one row or one column of several: any fault of that line would do as well as one along K.
    one_line = any(int(view.bad.any(dim).any(0).sum()) == 1 < view.bad.shape[3 - dim] for dim in (1, 2))
    for bug in BUGS:
        if bug in COSTLY and everywhere:
            break
        for found in fitting(view, bug):
            text = found.suspect.text
            if found.everywhere and found.certain and not (found.suspect.along_k and one_line):
                everywhere.append(text)
                if bug in COSTLY:
                    break
            elif found.everywhere:
                possible.append(text)
            elif where and not confined:
                confined = f"{text} in {where}"
    if everywhere and everywhere[0] in epilogue.NOTHING:
        # Beside large numbers a narrow accumulator loses every small one: nothing is left either.
        everywhere += [found.suspect.text for found in fitting(view, rounding.accumulators) if found.everywhere][:1]
    return everywhere, confined, possible
