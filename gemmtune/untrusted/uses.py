"""Manners in which programs call a GEMM, drawn in turn, and their words."""

import secrets
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..declaration.traits import Traits
from ..numerics.operands import Operands
from ..problem import Problem
from .turns import Turns

MODES = ("plain", "no_grad", "inference", "inference")
"""Modes of torch in which programs call a GEMM."""
MAIN = "the main thread"
TIMES, OFFSETS = ("1", "2", "3"), ("0", "1", "0", "3", "0", "8")
"""Calls without a pause, and multiples of the step at which operands begin inside of their memory."""
THREADS = ("another thread",) * 3 + (MAIN,) * 2
CORES, PARAMETERS = ("one core",) * 3 + ("",) * 2, ("b is a parameter",) * 3 + ("",) * 2
"""Words for the thread, the cores and the last argument of a call, each as often as it comes."""
ONE, PLACES = "one number", 2**20
CHANGED = (ONE, "order")
"""Words for what is changed for the calls before the last one, and number of places."""
NUMBERS, MORE = "other numbers", "a row more"
BEFORE = (
    NUMBERS,
    "a row less",
    "a column less",
    MORE,
    "a term less",
    "a NaN more",
    MORE,
    "both swapped",
    "a NaN more",
    MORE,
    "a huge term",
)
OF_BATCHES, OF_THESE_SIZES = tuple(x for x in BEFORE if x != MORE), (NUMBERS, "")
"""Words for a call before with other numbers, in the same place, or with NaN and more terms."""
UNFIT = ("a that does not fit", "b that does not fit")
FIRST = ("fewer terms", "fewer terms", *UNFIT)
"""Words for a call before all others of these sizes, after which a plan may be wrong.

The first one has as many numbers in each operand. The others are to be refused.
"""
MANY, INSIDE, TRAINED = ("many", "", "", ""), ("inside", ""), ("trained", "")
ONE_TENSOR = ("one tensor", "itself", "twice", "itself", "")
MAPPED = ("mapped", "", "")
"""Words for many calls before, for weights that are made in the mode of torch, trained or not to be written, and for one tensor,
which may be both operands."""
HALF, NO_WINDOWS = "half a row", -1
WINDOWS = ("0", "1", HALF, "", "", "")
"""Words for the step between rows of a that are windows of a signal, and the number without."""
RESULT = ("result", "", "")
"""Words for an a that is an earlier result, changed in place."""
AROUND = ("event loop", "waits that end early", "", "", "")
"""Words for what is around a call."""
INFERENCE = ("mode", "inference")
OPTIONAL: Mapping[str, object] = {
    "trained": False, "one": False, "wider": 0, "offset": 0, "around": "", "mode": "plain", "first": "", "windows": NO_WINDOWS
}  # fmt: skip
"""Parts of a manner that a GEMM may refuse by an error, with the values without them."""
PLAINLY: Mapping[str, Any] = {
    **OPTIONAL, "thread": False, "times": 1, "changed": [], "one_core": False, "parameter": False, "before": "", "many": False,
    "inside": False, "result": False, "mapped": 0, "beside": 0,
}  # fmt: skip
"""Manner without any of these parts, which no GEMM may refuse."""
WIDER = ("3072", "", "70144", "", "")
"""Words for operands that are columns of wider matrices, and how many elements of these are between their rows."""


def said(manner: Mapping[str, Any]) -> str:
    """Return a manner of calling in words."""
    words = {
        f"mode {manner['mode']} of torch": True, "another thread" if manner["thread"] else MAIN: True,
        f"{manner['times']} calls without a pause": True, "one core": manner["one_core"],
        f"b is a {'trained ' * manner['trained']}parameter": manner["parameter"], "b is made in this mode": manner["inside"],
        f"first a call with {manner['first']} in the same place": manner["first"],
        f"after a call with {manner['before']} in the same place": manner["before"],
        "a is an earlier result, which was changed": manner["result"],
        "after many calls": manner["many"], f"{manner['offset']} elements before each operand": manner["offset"],
        "parts of wider matrices": manner["wider"], "a and b are parts of one matrix": manner["one"],
        f"rows of a begin {manner['windows']} elements after each other": manner["windows"] != NO_WINDOWS,
        f"{manner['around']} around it": manner["around"], "b lies in memory that cannot be written": manner["mapped"],
        f"{manner['beside']} other threads that call it": manner["beside"],
    }  # fmt: skip
    return f"in a new process ({', '.join(one for one, holds in words.items() if holds)})"


def cosines(operands: Operands) -> None:
    """Let b be the transposed a, whose rows get a length of 1, as for a matrix of similarities."""
    if operands.a.is_floating_point():
        operands.a.div_(operands.a.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(operands.a.dtype).tiny))
    operands.b.copy_(operands.a.mT)


def overlap(a: torch.Tensor, how: str) -> int:
    """Let rows of a be windows of a signal, unless ``how`` is "". Return the step between them, or NO_WINDOWS."""
    if not how:
        return NO_WINDOWS
    rows, columns = a.shape
    step = columns // 2 if how == HALF else int(how)
    signal = a.flatten()[: (rows - 1) * step + columns].clone()
    a.copy_(signal.as_strided(a.shape, (step, 1)))
    return step


def drawn(
    problem: Problem,
    operands: Operands,
    turns: Turns,
    traits: Traits,
    *,
    beside: int,
    refused: Collection[tuple[str, object]],
    is_new: bool,
) -> dict[str, Any]:
    """Return a manner of calling that is next in turn, with so many threads ``beside``, and without what the GEMM has refused.

    A process to which the sizes are new may get a call before the first. For a product of one tensor b becomes the transposed a.
    """
    mode, times, thread, core, parameter, offset = map(turns.next, (MODES, TIMES, THREADS, CORES, PARAMETERS, OFFSETS))
    changed, wide, many = map(turns.next, (CHANGED, WIDER, MANY))
    inside, trained, one, around = map(turns.next, (INSIDE, TRAINED, ONE_TENSOR, AROUND))
    step = max(traits.min_alignment // operands.a.element_size(), 1)
    is_pair = len(operands.tensors) == 2
    is_plain = is_pair and operands.a.is_contiguous()
    takes = {"padded", "col"} & set(traits.layouts or ("padded", "col")) if step == 1 else set()  # undeclared ones are tried
    is_one = one != "" and is_pair and operands.a.dim() == 2 and problem.m == problem.n and len(takes) == 2
    sizes = zip((problem.m, problem.n, problem.k), traits.least, traits.multiples, strict=True)
    is_free = is_pair and all(size > max(least, 1) and by == 1 for size, least, by in sizes)
    if is_one and one != "one tensor":
        operands.b.copy_(operands.a) if one == "twice" and problem.k == problem.m else cosines(operands)
    is_signal = is_plain and "padded" in takes and operands.a.dim() == 2 and not (is_one or wide)
    window = overlap(operands.a, turns.next(WINDOWS)) if is_signal else NO_WINDOWS
    is_free = is_free and window == NO_WINDOWS
    first = turns.next(FIRST) if is_new and is_free and operands.a.dim() == 2 and max(traits.least) < 2 else ""
    is_mapped = is_plain and window == NO_WINDOWS and not is_one and not first and turns.next(MAPPED) != ""
    of_sizes = BEFORE if operands.a.dim() == 2 else OF_BATCHES
    kinds = of_sizes if is_plain and not is_one and is_free else OF_THESE_SIZES
    is_alone = is_mapped or window != NO_WINDOWS or first in UNFIT
    before = turns.next(kinds) if is_pair and not is_alone else ""
    is_result = turns.next(RESULT) != "" and is_plain and is_free and not is_one and before != MORE
    manner: dict[str, Any] = {
        "mode": mode, "times": int(times), "thread": thread != MAIN, "one_core": core != "", "parameter": parameter != "",
        "trained": trained != "" and parameter != "", "offset": 0 if is_one else int(offset) * step,
        "changed": [secrets.randbelow(PLACES) / PLACES for _ in "ab"] if changed == ONE else [],
        "before": before, "first": first, "beside": beside, "many": many != "",
        "wider": int(wide) if wide and is_plain and "padded" in takes and not is_one else 0, "inside": inside != "", "one": is_one,
        "around": around, "windows": window, "result": is_result, "mapped": step * operands.a.element_size() * is_mapped,
    }  # fmt: skip
    return manner | {part: OPTIONAL[part] for part, value in refused if manner[part] == value}
