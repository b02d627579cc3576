"""Check of choices after they were timed, on the operands of the timing with other values in the same memory.

A GEMM that returns what it computed before, or is right for a number of calls, passes every check that comes before the timing.
"""

import functools
import time
from collections.abc import Callable, Sequence

import torch

from ..choice import Choice, Status
from ..numerics.buffers import POISONS, allocate, poison
from ..numerics.expectation import Expectation
from ..numerics.judging import Judge
from ..numerics.slots import Stage
from ..timing.contenders import Call
from ..timing.overwritten import Side
from ..timing.timer import Timer
from .samples import Sample

AFTER = "after the timing, with other values in the same memory"
CALLS = 100
"""Calls before the operands change, so that a GEMM that is right for a number of calls has made them."""
MOST_S, MOST_OF_FUNCTIONS_S = 0.02, 0.5
"""Limits on the duration of these calls: of kernels, which do not count them, and of Python functions, which may."""
STAGES: tuple[tuple[Side, bool, bool], ...] = (
    ("b", True, False), ("a", False, False), ("a", True, True), ("b", False, False), ("b", True, True),
)  # fmt: skip
"""Changes of the operands: the side, True if all of it changes, and True if the result of the next call is judged.

Before that, the other side, and the first and last number, by which a choice may know operands, have their final values.
"""


def recheck_all(
    choices: Sequence[Choice], repeats_of: Callable[[Choice], Sequence[Call]], timer: Timer, expectation: Expectation
) -> dict[str, Sample | Exception]:
    """Repeat what was timed while the operands change, and judge the results by ``expectation``. Return the failures by name.

    ``repeats_of`` returns the calls of a choice with the first operand set of the timer. A choice that needs other memory for new
    operands, such as that of more blocks, gets it.
    """
    found: dict[str, Sample | Exception] = {}
    repeats: dict[str, Sequence[Call]] = {}

    def attempt(choice: Choice, work: Callable[[], Sample]) -> None:
        try:
            sample = work()
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything; the caller records it
            found[choice.name] = error
        else:
            if sample.status is not Status.OK:
                found[choice.name] = sample

    for choice in choices:
        attempt(choice, functools.partial(_begun, choice, repeats_of, repeats))
    with timer.overwritten(expectation.operands) as live:
        staying = {choice.name: choice for choice in choices if live.holds(choice)}
        for side, whole, judged in STAGES:
            live.write(side, whole=whole)
            for name in [name for name in staying if name not in found]:
                end = (live.out, expectation) if judged else ()
                attempt(staying[name], functools.partial(_called, staying[name], repeats[name], *end))
    for choice in choices:
        if choice.name not in staying and choice.name not in found:
            attempt(choice, functools.partial(_in_new_memory, choice, expectation))
    return found


def _begun(choice: Choice, repeats_of: Callable[[Choice], Sequence[Call]], repeats: dict[str, Sequence[Call]]) -> Sample:
    """Note the calls of a choice, and make them: a sample need not have used the first operand set."""
    repeats[choice.name] = repeats_of(choice)
    end = time.perf_counter() + (MOST_S if choice.own_results else MOST_OF_FUNCTIONS_S)
    for number in range(CALLS):
        if number and time.perf_counter() > end:
            break
        _called(choice, repeats[choice.name])
    return Sample(status=Status.OK)


def _in_new_memory(choice: Choice, expectation: Expectation) -> Sample:
    """Call a choice once with the operands of ``expectation``, and judge the result."""
    device = expectation.operands.named["a"].device
    a, b, *rest = Stage(choice.problem, device).place(expectation.operands).tensors
    tensors = (a, choice.pack(b) if choice.packed_format is not None else b, *rest)
    out, kernel = allocate(choice.problem.out, a.device), choice.build()
    run = functools.partial(kernel.run, out) if kernel.run_new is None else kernel.run_new
    return _called(choice, [functools.partial(run, tensors, expectation.operands.scalars)], out, expectation)


def _called(
    choice: Choice, calls: Sequence[Call], out: torch.Tensor | None = None, expectation: Expectation | None = None
) -> Sample:
    """Make the calls, whose results are new tensors or in ``out``, and judge them if there is an expectation."""
    for number, call in enumerate(calls):
        if out is None or expectation is None:
            call()
            continue
        payload = POISONS[out.dtype][number % 2]
        poison(out, payload)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)  # the call may be on another stream
        result = call()
        judge = Judge(choice.problem, choice.claims, expectation.operands.extra)
        finding = judge.find(result if isinstance(result, torch.Tensor) else out, expectation, payload)
        bad = finding.bad_element(finding.state.tolist(), batched=len(choice.problem.out.size) == 3)
        if bad is not None:
            return Sample(status=Status.WRONG_RESULT, reason=f"{AFTER}: {bad.text()}")
    return Sample(status=Status.OK)
