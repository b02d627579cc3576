"""From a case to its outcome, in this process."""

from __future__ import annotations

import contextlib
import time

import torch

from ..bench.bench import Bench, NoResult
from ..bench.outcome import Failure, Outcome, Verdict
from ..cases.case import Case
from ..cases.scope import Scope
from ..gemms.refusals import Impossible, Refused
from ..gemms.subject import Subject
from ..properties.table import property_named

__all__ = ["judge"]


def judge(subject: Subject, case: Case, device: torch.device, *, examine: bool = True) -> Outcome:
    """Run a case and say what became of it; without ``examine`` not what a wrong result looks like.

    Raises:
        Exception: the GEMM made the device unusable, or the suite itself is at fault.
    """
    started = time.perf_counter()
    scope = Scope(traits=subject.traits, device_type=device.type)
    bench = Bench(subject, case, device, examine=examine)
    verdict, reason = Verdict.PASSED, ""
    try:
        with subject.conditions(bench.problem), contextlib.suppress(NoResult):
            property_named(case.property_name).check(bench)
    except Refused as refusal:
        verdict = Verdict.REFUSED if scope.may_refuse(case) else Verdict.RAISED
        reason = str(refusal)
    except Impossible as obstacle:
        verdict, reason = Verdict.REFUSED, f"not possible here: {obstacle}"
    failures = tuple(bench.failures)
    if verdict is Verdict.RAISED:
        failures += (Failure(property_name=case.property_name, message=f"raised for what it declares: {reason}"),)
    elif failures:
        verdict = Verdict.FAILED
    return Outcome(
        case=case,
        verdict=verdict,
        failures=failures,
        reason=reason,
        choice=bench.choice,
        error_over_bound=bench.error_over_bound,
        grade=bench.grade,
        seconds=time.perf_counter() - started,
    )
