"""Selection for one problem: enumerate, precompile, verify, measure, pick, store."""

import dataclasses
import time
from typing import Literal

from ..choice import Status
from ..interrupts import finishing
from ..store.store import Store, open_store
from ..timing.memory import require_memory_to_tune
from .candidates import Candidates, Retry, opened, row_of
from .locks import tuning_lock
from .log import append_log
from .machine_limits import MachineLimits
from .measure import measure
from .pick import right
from .precompile import Compilation
from .progress import Progress
from .result import ProblemResult


def select(
    candidates: Candidates,
    progress: Progress,
    compilation: Compilation | None = None,
    *,
    retry: Retry = "needed",
    limits: MachineLimits | None = None,
) -> tuple[Candidates, ProblemResult]:
    """Return the candidates with every choice that has an outcome, and all findings. Measure only what the store does not know.

    ``retry`` says what is measured again of a busy machine. If another process tunes the same problem, wait and take its answer,
    even one from a busy machine. An interrupted tuning keeps its measurements. ``limits`` are those of a longer tuning. The
    caller warns of a busy machine.

    Raises ShortMemoryError if the operands do not fit into the free memory.
    """
    begun, store = time.perf_counter(), open_store(candidates.settings)
    candidates = candidates.stored(store, retry=retry)
    problem, settings = candidates.problem, candidates.settings
    limits = limits or MachineLimits(candidates.device, settings, store)
    if problem.empty or candidates.complete:
        return candidates, _result(candidates, limits, begun, "store")

    def waiting() -> None:
        progress.message("another process tunes this problem: waiting for it")

    with tuning_lock(settings, problem.key, candidates.fingerprint, waiting) as waited:
        candidates = candidates.stored(store, retry="needed" if waited else retry)
        if candidates.complete:
            return candidates, _result(candidates, limits, begun, "store")
        require_memory_to_tune([problem], candidates.device, settings)
        candidates, result = _measured(candidates, store, progress, compilation, limits, begun)
    if settings.log_file:
        append_log(settings.log_file, result)
    return candidates, result


def _measured(
    candidates: Candidates, store: Store, progress: Progress, compilation: Compilation | None, limits: MachineLimits, begun: float
) -> tuple[Candidates, ProblemResult]:
    """Return the candidates with the outcomes of this tuning, which are stored even if it is interrupted."""
    outcomes = dict(candidates.known)
    with finishing():
        try:
            tried = measure(candidates, outcomes, progress, compilation, limits)
            if tried.late:  # what was not reached is compared at the next tuning
                outcomes |= {digest: opened(o) for digest, o in outcomes.items() if not o.from_store}
        finally:
            fresh = [o for digest, o in outcomes.items() if o is not candidates.known.get(digest)]
            store.put([row_of(o, candidates.problem, candidates.fingerprint) for o in fresh])
        tried = dataclasses.replace(tried, known=outcomes)
        return tried, _result(tried, limits, begun, "measured")


def _result(candidates: Candidates, limits: MachineLimits, begun: float, source: Literal["measured", "store"]) -> ProblemResult:
    listed = tuple(candidates.known.values())
    picked, problem, known = candidates.picked, candidates.problem, limits.known()
    return ProblemResult(
        problem=problem,
        outcomes=(*right(listed), *(o for o in listed if o.status is not Status.OK)),
        refusals=tuple(candidates.offers.refusals),
        pick=picked.name if picked else None,
        limit_us=known.us(problem, candidates.device),
        limit_disturbed=known.disturbed_for(problem),
        seconds=time.perf_counter() - begun,
        source=source,
        partial="" if candidates.problem.empty else candidates.partial(),
    )
