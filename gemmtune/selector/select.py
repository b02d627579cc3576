"""Selection for one problem: enumerate, precompile, verify, measure, pick, store."""

import dataclasses
import logging
import time
from typing import Literal

from ..choice import Status
from ..interrupts import finishing
from ..store.store import Store
from ..timing.memory import require_memory_to_tune
from ..timing.rounds import BUSY_MARK
from ..workers.locks import tuning_lock
from .candidates import Candidates, Retry, opened, row_of
from .log import append_log
from .machine_limits import MachineLimits
from .measure import measure
from .pick import right
from .precompile import Compilation
from .progress import Progress
from .result import AGAIN, ProblemResult

log = logging.getLogger("gemmtune")


def select(
    candidates: Candidates,
    store: Store,
    progress: Progress,
    compilation: Compilation | None = None,
    *,
    retry: Retry = "needed",
    limits: MachineLimits | None = None,
    of_table: bool = False,
) -> tuple[Candidates, ProblemResult]:
    """Return the candidates with every choice that has an outcome, and all findings. Measure only what the store does not know.

    ``retry`` says what is measured again of a busy machine. If another process tunes the same problem, wait and take its answer,
    even one from a busy machine. An interrupted tuning keeps its measurements. ``limits`` are those of a longer tuning. The
    caller warns of a busy machine if this is one M ``of_table``.

    Raises ShortMemoryError if the operands do not fit into the free memory.
    """
    begun = time.perf_counter()
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
        outcomes = dict(candidates.known)
        with finishing():
            try:
                tried = measure(candidates, outcomes, progress, compilation, limits)
                if tried.late:  # what was not reached is compared at the next tuning
                    outcomes |= {digest: opened(o) for digest, o in outcomes.items() if not o.from_store}
            finally:  # even an interrupted tuning stores its outcomes
                fresh = [o for digest, o in outcomes.items() if o is not candidates.known.get(digest)]
                store.put([row_of(o, problem, candidates.fingerprint) for o in fresh])
        candidates = dataclasses.replace(tried, known=outcomes)
    result = _result(candidates, limits, begun, "measured")
    if result.disturbed_now and not of_table:
        log.warning("%s was measured %s (%s): %s", problem, BUSY_MARK, result.disturbed_now, AGAIN)
    if settings.log_file:
        append_log(settings.log_file, result)
    return candidates, result


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
