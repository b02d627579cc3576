"""Diagnosis of a bug by reproduction: a wrong result is compared with the result that each known bug would give.

``BUGS`` lists the known bugs. The first match is the diagnosis. Further matches are kept, since a small case may not tell two bugs
apart. A bug that explains the wrong elements but would spoil right ones is reported with the place of the errors. Without a match,
the diagnosis describes the map of errors, or stays empty.
"""

import contextlib
from collections.abc import Iterator

import torch

from . import addressing, epilogue, k_ranges, quantized, rounding, sparse
from .evidence import Evidence, View
from .groups import GroupEvidence, diagnose_groups
from .match import Bug, Diagnosis, fitting, kind_of
from .signs import errors_in, first_sign, last_sign, place

__all__ = ["BUGS", "Diagnosis", "Evidence", "GroupEvidence", "diagnose", "diagnose_grouped", "kind_of"]

BUGS: tuple[Bug, ...] = (
    epilogue.missing, epilogue.scalars, epilogue.wrong_axis, epilogue.per_split, epilogue.scales,
    quantized.factors, quantized.weights, quantized.blocks, quantized.strides, quantized.floats, sparse.blocks,
    addressing.transposed, addressing.batches, addressing.misread, addressing.miswritten,
    k_ranges.overlapping, k_ranges.k_ranges, addressing.clamped, addressing.repeated, addressing.unmasked,
    rounding.unsigned, quantized.clamped_pairs, rounding.narrowed, rounding.flushed,
    rounding.steps, rounding.partials, rounding.accumulators,
)  # fmt: skip
"""Known bugs in the order of trial: certain and cheap ones first, expensive ones last."""
COSTLY = (rounding.steps, rounding.partials, rounding.accumulators)
"""Bugs to try only if no other gives the result."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of a wrong result, such as ``last K block of 16 dropped``, or one with an empty text."""
    if evidence.problem.empty:
        return Diagnosis()
    certain = first_sign(evidence)
    if certain and bool((evidence.unwritten & evidence.bad).any()):
        return Diagnosis(certain)
    with _one_thread():
        view = View(evidence)
        everywhere, confined, possible = _reproduced(view, evidence)
        text = certain or next(iter(everywhere), "") or confined
        # Without a matching bug, describe the errors.
        text = text or rounding.overflow(view) or last_sign(evidence) or rounding.round_off(view) or errors_in(evidence)
        text = text or rounding.few_bits(view)
    return Diagnosis(text, tuple(dict.fromkeys(other for other in (*everywhere, *possible) if other != text)))


def diagnose_grouped(known: GroupEvidence) -> Diagnosis:
    """Return the diagnosis of a wrong grouped product, such as ``matrix of the next group``, or one with an empty text."""
    if known.problem.empty:
        return Diagnosis()
    with _one_thread():
        return Diagnosis(*diagnose_groups(known, diagnose))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread. For thousands of small operations on a busy machine, several threads take 20 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _reproduced(view: View, evidence: Evidence) -> tuple[list[str], str, list[str]]:
    """Return the bugs that give this result everywhere, the first that gives only the wrong elements, and the unsure ones."""
    everywhere: list[str] = []
    possible: list[str] = []
    confined = ""
    where = place(evidence.bad)
    # Errors in a single line may come from any fault of that line, as well as from a fault along K.
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
        # Next to large numbers, a narrow accumulator loses every small one, which gives the same zeros.
        everywhere += [found.suspect.text for found in fitting(view, rounding.accumulators) if found.everywhere][:1]
    return everywhere, confined, possible
