"""Shapes of the calls that a verdict rests on: small ones, which are called often, then larger ones, next to torch."""

import math
import time
from collections.abc import Iterator, Sequence

from ..conformance.cases.case import Case
from ..conformance.cases.statement import problem_of
from ..declaration.subject import Subject
from ..untrusted.candidate import Candidate
from ..untrusted.shape import Shape
from ..untrusted.trial import Trial
from ..untrusted.twin import Twin
from .levels import Level

GRACE_S = 5.0
"""Seconds that a shape may take when the time is over."""
TIMED_OPS = ("mm", "bmm", "addmm", "baddbmm", "int_mm")
"""Operations for which torch has a function of the same name."""
SMALL_SIDE, SMALL_MACS = 64, 2**19
LARGE_MACS, LARGE_CALLS = 2**22, 3
"""Size and number of the calls with each dtype of which no shape is timed."""
GPU_MACS = 2**36
NARROWEST, WIDEST = 0.5, 1.6
"""Range of a side, in multiples of that of a cube."""
PER_M = 10**6


def timed_ops(subject: Subject) -> list[str]:
    """Return the operations that torch has too. Times are those of the first one."""
    return [op for op in TIMED_OPS if op in (subject.traits.ops or ("mm",))]


def timed_calls(
    subject: Subject,
    candidate: Candidate,
    rival: tuple[Subject, Candidate],
    level: Level,
    taken: Sequence[Case],
    twin: Twin | None = None,
) -> Iterator[Shape]:
    """Yield the calls of each shape. Sizes are drawn among those that the GEMM declares, and each dtype has a large one.

    ``taken`` are the cases of the suite that the GEMM took.
    """
    ops, trial = timed_ops(subject), Trial(subject, candidate, rival, twin)
    of_op = {op: tuple(dict.fromkeys(case.dtype for case in taken if case.op == op)) for op in ops}
    ops = [op for op in ops if of_op[op]] or ops[:1]
    if not ops:
        return
    dtypes = of_op[ops[0]]
    deadline = time.monotonic() + level.calls_s
    largest = GPU_MACS if candidate.device.type != "cpu" else level.largest * PER_M
    drawn = [dtypes[number % len(dtypes)] if dtypes else "float32" for number in range(2 + level.shapes)]
    plan = [(ops[0], dtype, SMALL_MACS, level.small_calls, False) for dtype in drawn[:2]]
    plan += [(op, dtype, SMALL_MACS, level.small_calls // 2, False) for op in ops[1:] for dtype in of_op[op][:1]]
    plan += [(ops[0], dtype, largest, level.timed_calls, True) for dtype in drawn[2:]]
    plan += [(ops[0], dtype, min(largest, LARGE_MACS), LARGE_CALLS, False) for dtype in dtypes if dtype not in drawn[2:]]
    for number, (op, dtype, macs, count, timed) in enumerate(plan):
        if time.monotonic() > deadline and number > 1 + len(ops):
            return
        transposed = number % 2 and any(case.op == op and case.b == "col" for case in taken)  # as the weight of a layer
        bias = (*subject.traits.bias, "n")[0]
        whole = Case(property_name="bound", op=op, dtype=dtype, m=1, n=1, k=1, bias=bias)
        case = _drawn(trial, subject, whole.changed(b="col") if transposed else whole, macs)
        problem = problem_of(case, candidate.device.type)
        yield trial.calls(problem, count, timed=timed, deadline=deadline + GRACE_S, profiled=level.profiled)


def _drawn(trial: Trial, subject: Subject, case: Case, macs: int) -> Case:
    """Return the case with sizes of at most about ``macs`` multiplications."""
    traits, rng = subject.traits, trial.rng
    side = min(SMALL_SIDE, macs ** (1 / 3)) if macs <= SMALL_MACS else macs ** (1 / 3)
    sizes = [max(least, round(side * rng.uniform(NARROWEST, WIDEST)), 1) for least in traits.least]
    while math.prod(sizes) > macs:
        sizes[rng.randrange(3)] //= 2
    return legal(case.changed(m=sizes[0], n=sizes[1], k=sizes[2]), subject)


def legal(case: Case, subject: Subject) -> Case:
    """Return the case with the next larger sizes that the GEMM declares, and two matrices if it is for batches."""
    traits = subject.traits
    sizes = zip((case.m, case.n, case.k), traits.least, traits.multiples, strict=True)
    m, n, k = (max(-(-max(size, least) // by) * by, by) for size, least, by in sizes)
    return case.changed(m=m, n=n, k=k, batch=2 if case.batched else 1)
