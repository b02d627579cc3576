"""Selection for one problem: enumerate, precompile, verify, measure, pick, store."""

from __future__ import annotations

import dataclasses
import time
from typing import Literal

from ..choice import Choice, Status
from ..device import DeviceInfo
from ..interrupts import finishing
from ..problem import Problem
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store
from ..timing.limits import limit_names, limit_us
from ..workers.locks import tuning_lock
from .candidates import Candidates, row_of
from .log import append_log
from .measure import measure
from .pick import right
from .precompile import Compilation
from .progress import Progress
from .remote import open_session
from .result import ProblemResult

LIMITS = "limits"
"""Timing mode in the fingerprint under which the store keeps the limits of a machine."""


def select(
    candidates: Candidates,
    store: Store,
    progress: Progress,
    compilation: Compilation | None = None,
    *,
    reliable: bool = False,
) -> tuple[Choice | None, ProblemResult]:
    """Return the pick for one problem, None if no choice is correct, and all findings. Measure only what the store does not know.

    With ``reliable``, outcomes from a busy machine are measured again. If another process tunes the same problem, wait and take its
    answer, even one from a busy machine. An interrupted tuning keeps its measurements.
    """
    begun = time.perf_counter()
    candidates = candidates.stored(store, reliable=reliable)
    problem, settings = candidates.problem, candidates.settings
    if problem.empty or candidates.complete:
        return candidates.picked, _result(candidates, store, begun, "store")

    def waiting() -> None:
        progress.message("another process tunes this problem: waiting for it")

    with tuning_lock(settings, problem.key, candidates.fingerprint, waiting) as waited:
        candidates = candidates.stored(store, reliable=reliable and not waited)
        if candidates.complete:
            return candidates.picked, _result(candidates, store, begun, "store")
        outcomes = dict(candidates.known)
        with finishing():
            try:
                tried = measure(candidates, outcomes, progress, compilation)
            finally:  # even an interrupted tuning stores its outcomes
                fresh = [o for digest, o in outcomes.items() if o is not candidates.known.get(digest)]
                store.put([row_of(o, problem, candidates.fingerprint) for o in fresh])
        candidates = dataclasses.replace(tried, known=outcomes)
    result = _result(candidates, store, begun, "measured")
    if settings.log_file:
        append_log(settings.log_file, result)
    return candidates.picked, result


def _result(candidates: Candidates, store: Store, begun: float, source: Literal["measured", "store"]) -> ProblemResult:
    listed = tuple(candidates.known.values())
    picked = candidates.picked
    return ProblemResult(
        problem=candidates.problem,
        outcomes=(*right(listed), *(o for o in listed if o.status is not Status.OK)),
        refusals=tuple(candidates.offers.refusals),
        pick=picked.name if picked else None,
        limit_us=limit_us(candidates.problem, store.limits(fingerprint_text(candidates.device, LIMITS))),
        seconds=time.perf_counter() - begun,
        source=source,
    )


def ensure_limits(problem: Problem, device: DeviceInfo, settings: Settings, store: Store, progress: Progress) -> None:
    """Measure the limits that a problem needs unless the store has them. Without limits only the percentages are missing."""
    machine = fingerprint_text(device, LIMITS)
    known = store.limits(machine)
    if all(name in known for name in limit_names(problem.dtype_label)):
        return
    progress.stage("limits of this machine", 0, 1)
    with open_session(problem, device, settings) as session:
        store.put_limits(machine, session.limits(known))
    progress.stage("limits of this machine", 1, 1)
