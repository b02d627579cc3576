"""The ways from a problem to a plan, in the order in which they are tried.

``STRATEGIES`` is that order. Each strategy returns a plan, or None where it does not apply:

1. ``batch_invariant_choice`` where results must not depend on the batch (``batch_invariant``);
2. ``known_of_other_rows``: the table of this weight, or the pick of the nearest M that was tuned;
3. ``predicted_table``, where new weights get a default table (``tune="predict"``);
4. ``the_only_choice``, if there is nothing to choose from;
5. ``stored_pick``, where nothing may be tuned;
6. ``tuned_pick``: what the store knows of this very problem, or a tuning now;
7. ``torch_runs``, with a warning that says why.
"""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from ..backends.table import load
from ..choice import Choice
from ..device import DeviceInfo, detect, made_current
from ..errors import ErrorFromChoice, GemmtuneError, NoValidChoicesError, ShortMemoryError
from ..filters import why_not_skipping
from ..problem import Problem
from ..problem.rows import RowClass, row_classes
from ..selector.candidates import Candidates, candidates_for
from ..selector.defaults import defaults_for
from ..selector.log import warn_if_busy
from ..selector.progress import FirstCall, Progress, notify
from ..selector.ranges import tune_rows
from ..selector.result import without_pick
from ..selector.select import select
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store, open_store
from ..warning import warn, warn_once
from ..workers.worker import NoWorkerError
from .absent import announce_absent, announce_if_absent
from .asked import USUAL_ROWS, command, note
from .host import host_us
from .plan import Plan
from .ranges import Origin, forget_range_plans, range_plan_for

LEAST_INVARIANT_ROWS = 256
"""Rows of the table that the first batch-invariant call of a weight makes, at least. Larger Ms are checked call by call."""


@dataclass(kw_only=True)
class Request:
    """A problem that needs a plan. Candidates and store are looked up when the first strategy needs them."""

    problem: Problem
    device: DeviceInfo
    settings: Settings
    capturing: bool
    """A CUDA graph is being captured: nothing is tuned."""

    failed: GemmtuneError | None = None
    """The reason for which no choice was picked."""

    @cached_property
    def may_tune(self) -> bool:
        """True while a choice may be measured for this problem."""
        return self.settings.tunes

    @cached_property
    def candidates(self) -> Candidates:
        host = host_us(self.device, self.settings)
        return candidates_for(self.problem, self.device, self.settings, host_us=host)

    @cached_property
    def store(self) -> Store:
        return open_store(self.settings)


def make_plan(problem: Problem, index: int, settings: Settings) -> Plan:
    """Make a new plan for device ``index`` (-1: CPU) by the first strategy that has one."""
    device = detect("cpu" if index < 0 else torch.device("cuda", index))
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    ended = has_main_ended()
    if ended and settings.tune != "never":
        warn_once(
            "The main thread of this program has ended, after which Python lets nothing be tuned: new GEMMs run stored choices or "
            "torch. Let the main thread wait for the others (join), or tune ahead."
        )
    if capturing or ended:
        settings = settings.never_tuning
    request = Request(problem=problem, device=device, settings=settings, capturing=capturing)
    plans = (strategy(request) for strategy in STRATEGIES)
    plan = next(plan for plan in plans if plan is not None)
    if "candidates" in vars(request) and plan.origin != "tuned":
        announce_if_absent(request.candidates, plan.choice)
    return plan


def has_main_ended() -> bool:
    """Return True if the main thread has ended, as in functions of ``atexit`` and in threads that outlive it.

    Python refuses work for pools of threads then, so that nothing can be compiled or measured.
    """
    return not threading.main_thread().is_alive()


def batch_invariant_choice(request: Request) -> Plan | None:
    """Plan the choice of the weight's batch-invariant table, which its first call makes. Torch is no way out: its bits differ.

    Raises NoValidChoicesError if there is none for this M, or none is stored and nothing may be tuned.
    """
    problem, device, settings = request.problem, request.device, request.settings
    if not settings.batch_invariant:
        return None
    if not (classes := row_classes(problem)):
        reason = "an index picks or adds up its rows, so that it has no table of M"
        remedy = "Call gemmtune.grouped_mm: under batch_invariant it runs the grouped product by a table, and the index in a step."
        raise NoValidChoicesError(f"{problem}, batch-invariant", [("every choice", "refused", reason)], remedy)
    known = range_plan_for(problem, device, settings)
    if known is None and request.may_tune:
        rows = range(1, max(LEAST_INVARIANT_ROWS, problem.m) + 1)
        cost_us = host_us(device, settings)
        tune_rows(classes[0], rows, device, settings, FirstCall(problem), host_us=cost_us)
        forget_range_plans()
        known = range_plan_for(problem, device, settings)
    found = known.find(problem) if known is not None else "nothing is stored, and tune is 'never'"
    if isinstance(found, str):
        made_by = command(classes[0], max(USUAL_ROWS, problem.m), batch_invariant=True)
        remedy = f"Make a table that has it: {made_by}. Torch is no way out: the bits of a row depend on its batch."
        raise NoValidChoicesError(f"{problem}, batch-invariant", [("every choice", "refused", found)], remedy)
    return Plan(problem=problem, choice=found.choice, kernel=found.kernel, origin=found.origin, shared=known)


def known_of_other_rows(request: Request) -> Plan | None:
    """Plan by the weight's table, one by rule only for calls that may not tune, or by the pick of the nearest M."""
    problem, device, settings = request.problem, request.device, request.settings
    if settings.rows != "shared" or settings.tune == "force":
        return None
    known = range_plan_for(problem, device, settings)
    if known is None or (known.by_rule and (request.may_tune or (settings.tune == "predict" and known.lost(device, settings)))):
        return None
    if problem.m in known.tuned:  # this M was measured, which tells more
        request.may_tune &= known.table is None
        return None
    found = known.find(problem)
    if known.table is None or known.table.index(problem.m) is None or isinstance(found, str):
        runs = f"torch runs it ({found})" if isinstance(found, str) else f"{found.choice.name} runs it"
        note(known.rows_class, problem.m, fingerprint_text(device, settings.timing), request.store, runs)
    if isinstance(found, str):
        plan = fallback(problem, device, settings)
        if known.serves(problem.m):
            announce_absent(problem, found, plan.choice)
        return plan
    shared = known if known.table is not None else None
    return Plan(problem=problem, choice=found.choice, kernel=found.kernel, origin=found.origin, shared=shared)


def predicted_table(request: Request) -> Plan | None:
    """Plan by a new default table of the weight, whose choices are verified now and not measured. A weight has one attempt."""
    problem, device, settings = request.problem, request.device, request.settings
    if settings.tune != "predict" or settings.rows != "shared" or settings.batch_invariant:
        return None
    for rows_class in row_classes(problem)[:1]:
        attempt = (rows_class, device, settings.token)
        known = range_plan_for(problem, device, settings)
        if attempt in _attempts or (known is not None and not (known.by_rule and known.lost(device, settings))):
            return None
        _attempts.add(attempt)
        try:
            notify(f"verifying likely choices for {rows_class}: once, later calls and processes reuse its table")
            made = [x.stored(request.store) for x in defaults_for([rows_class], device, settings, Progress())]
        except (NoValidChoicesError, NoWorkerError, ShortMemoryError) as error:
            warn(f"nothing is predicted for {rows_class}: {error}", UserWarning)
            return None
        if any(made):
            forget_range_plans()
            return known_of_other_rows(request)
    return None


_attempts: set[tuple[RowClass, DeviceInfo, int]] = set()
"""Weights for which a default table was made or found impossible."""


def the_only_choice(request: Request) -> Plan | None:
    """Plan the only choice, untimed."""
    only = request.candidates.only
    if only is None or request.settings.tune == "force":
        return None
    return bound(request.problem, only, "only choice", request.device, request.settings)


def stored_pick(request: Request) -> Plan | None:
    """Plan the stored pick where nothing may be tuned, else torch."""
    if request.may_tune:
        return None
    choice = request.candidates.stored_anyhow(request.store).picked
    if choice is not None:
        return bound(request.problem, choice, "store", request.device, request.settings)
    if request.capturing:
        warn(f"no stored choice for {request.problem} while a CUDA graph is captured: torch runs. Tune it before.", UserWarning)
    plan = fallback(request.problem, request.device, request.settings)
    return dataclasses.replace(plan, lasting=not request.capturing)


def tuned_pick(request: Request) -> Plan | None:
    """Plan the pick of the store, or of a tuning now if the store does not know every choice."""
    listener, candidates, budget_s = FirstCall(request.problem), request.candidates, request.settings.first_call_budget_s
    try:
        candidates = candidates if budget_s is None else candidates.within(budget_s)
        candidates, result = select(candidates, listener)
    except (NoWorkerError, ShortMemoryError) as missing:
        request.failed = missing
        return None
    if result.source == "measured":
        warn_if_busy(result)
        forget_range_plans()  # one of them was that nothing is known
        listener.end(result)
    choice = candidates.picked
    if choice is None:
        request.failed = without_pick(result, request.settings)
        return None
    origin: Origin = "store" if result.source == "store" else "tuned"
    return bound(request.problem, choice, origin, request.device, request.settings)


def torch_runs(request: Request) -> Plan:
    """Plan torch's own operation, with a warning; raise where the settings allow no fallback."""
    assert request.failed is not None
    if not request.settings.fallback_to_aten:
        raise request.failed
    cannot = f"{request.problem} cannot be tuned: " if isinstance(request.failed, NoWorkerError | ShortMemoryError) else ""
    warn(f"{cannot}{request.failed}\ntorch runs instead.", UserWarning)
    return fallback(request.problem, request.device, request.settings)


STRATEGIES: tuple[Callable[[Request], Plan | None], ...] = (
    batch_invariant_choice,
    known_of_other_rows,
    predicted_table,
    the_only_choice,
    stored_pick,
    tuned_pick,
    torch_runs,
)


def fallback(problem: Problem, device: DeviceInfo, settings: Settings) -> Plan:
    """Return the plan of torch's own operation."""
    choices = load("aten").enumerate(problem, device, settings).choices
    if settings.absent_blocks == "skipped":
        choices = [c for c in choices if why_not_skipping(c) is None] or choices
    choice = next((c for c in choices if c.baseline), choices[0])
    return Plan(problem=problem, choice=choice, kernel=choice.build(), origin="fallback")


def bound(problem: Problem, choice: Choice, origin: Origin, device: DeviceInfo, settings: Settings) -> Plan:
    """Load the choice in this process; where that fails, warn and return torch's own operation."""
    try:
        with made_current(device.gpu):
            return Plan(problem=problem, choice=choice, kernel=choice.build(), origin=origin)
    except (GemmtuneError, RuntimeError, OSError) as error:
        if not settings.fallback_to_aten:
            raise ErrorFromChoice(choice.name, str(problem), f"{type(error).__name__}: {error}") from error
        warn(f"{choice.name} cannot be loaded ({type(error).__name__}: {error}); torch runs {problem}", UserWarning)
        return fallback(problem, device, settings)
