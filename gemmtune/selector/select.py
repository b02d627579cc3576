"""Problem → pick: enumerate, precompile, verify, benchmark, pick, remember."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

from ..choice import Status
from ..device import DeviceInfo
from ..problem import Problem
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store
from ..timing.limits import limit_us
from ..workers.locks import tuning_lock
from .candidates import Candidates, known_candidates, row_of
from .log import append_log
from .machine import limits_of
from .measure import measure
from .pick import pick, right
from .precompile import Compilation
from .progress import Progress
from .result import Outcome, ProblemResult

__all__ = ["select"]


def select(
    problem: Problem,
    device: DeviceInfo,
    settings: Settings,
    store: Store,
    progress: Progress,
    compilation: Compilation | None = None,
) -> ProblemResult:
    """Find the pick for one problem, measuring only what the store does not know.

    A process that finds another one at work on the same problem waits and takes its answer. An interrupted tuning keeps what it
    measured.
    """
    begun = time.perf_counter()
    candidates = known_candidates(problem, device, settings, store)
    if problem.empty or candidates.complete():
        return _result(problem, candidates, candidates.known, device, store, begun, "store")
    fingerprint = fingerprint_text(device, settings.timing)
    with tuning_lock(
        settings, problem.key, fingerprint, lambda: progress.message("another process tunes this problem: waiting for it")
    ):
        candidates = known_candidates(problem, device, settings, store)
        if candidates.complete():
            return _result(problem, candidates, candidates.known, device, store, begun, "store")
        outcomes = dict(candidates.known)
        try:
            measure(problem, device, settings, candidates, outcomes, progress, compilation)
        finally:
            fresh = [o for digest, o in outcomes.items() if o is not candidates.known.get(digest)]
            store.put([row_of(o, problem, fingerprint) for o in fresh])
    result = _result(problem, candidates, outcomes, device, store, begun, "measured")
    if settings.log_file:
        append_log(settings.log_file, result)
    return result


def _result(
    problem: Problem,
    candidates: Candidates,
    outcomes: Mapping[str, Outcome],
    device: DeviceInfo,
    store: Store,
    begun: float,
    source: Literal["measured", "store"],
) -> ProblemResult:
    listed = tuple(outcomes.values())
    chosen = pick(listed)
    return ProblemResult(
        problem=problem,
        outcomes=(*right(listed), *(o for o in listed if o.status is not Status.OK)),
        refusals=tuple(candidates.offers.refusals),
        pick=chosen.name if chosen else None,
        limit_us=limit_us(problem, limits_of(device, store)),
        seconds=time.perf_counter() - begun,
        source=source,
    )
