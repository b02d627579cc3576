"""Plans: a choice bound to one problem and device, with nothing left to decide; made once and kept."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from .. import settings as settings_module
from ..backends.table import load
from ..choice import Choice, Kernel, RunNew, Scalars, Tensors
from ..device import DeviceInfo, detect
from ..errors import ErrorFromChoice, GemmtuneError, NoValidChoicesError
from ..filters import why_not_skipping
from ..native.lookup import forget
from ..problem import Layout, Problem
from ..problem.operations import ROLES
from ..problem.rows import row_classes
from ..selector.candidates import candidates_for
from ..selector.progress import FirstCall
from ..selector.ranges import tune_rows
from ..selector.select import select
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import open_store
from ..workers.worker import NoWorkerError
from .allocate import new_output
from .asked import USUAL_ROWS, command, note
from .host import host_us
from .keys import without_rows
from .ranges import RangePlan, forget_range_plans, range_plan_for

Origin = Literal["store", "tuned", "only choice", "range", "nearest", "fallback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A choice made ready for operands of exactly the problem's layouts.

    ``origin`` tells where the choice came from: the store, a tuning just now, there was only one, the table of its range of M, what
    was tuned for the nearest M, or torch as the fallback.
    """

    problem: Problem
    choice: Choice
    kernel: Kernel
    origin: Origin
    lasting: bool = True
    """May be kept for later calls; false for what torch had to do while a CUDA graph was captured."""

    shared: RangePlan | None = None
    """The table that the choice is from: its choices for other Ms serve calls that differ in nothing else."""

    new: RunNew = field(init=False)
    """``new(tensors, scalars)`` runs into a result of its own."""

    spans: tuple[int, ...] = field(init=False)
    """Bytes from the first to just past the last element of out and of each tensor that is read."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "new", self.kernel.run_new or _into_new(self.kernel, self.problem.out))
        p = self.problem
        read = [x for role in ROLES if (x := getattr(p, role)) is not None] + list(p.epilogue.operands if p.epilogue else ())
        object.__setattr__(self, "spans", tuple(x.span * x.dtype.itemsize for x in (p.out, *read)))

    @property
    def plan(self) -> Plan:
        """Itself: what a table of ready calls asks each entry for."""
        return self

    def apart(self, out: torch.Tensor, tensors: Tensors) -> bool:
        """Whether ``out`` lies wholly before or behind each tensor that is read."""
        first = out.data_ptr()
        end = first + self.spans[0]
        i = 1
        for x in tensors:
            address = x.data_ptr()
            if address < end and first < address + self.spans[i]:
                return False
            i += 1
        return True

    def into(self, out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        """Run into ``out``, and count its version up, by which autograd notices what has been overwritten."""
        self.kernel.run(out, tensors, scalars)
        torch._C._increment_version((out,))
        return out


def _into_new(kernel: Kernel, layout: Layout) -> RunNew:
    run = kernel.run

    def new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        out = new_output(layout, tensors[0])
        run(out, tensors, scalars)
        return out

    return new


class Ready(Protocol):
    """What a call with a known key does: a Plan, or one that autograd follows."""

    @property
    def plan(self) -> Plan:
        """The plan that is run."""

    @property
    def new(self) -> RunNew:
        """``new(tensors, scalars)`` runs into a result of its own."""


ready: dict[Hashable, Ready] = {}
"""Plans by what can be read off the operands in a microsecond: the first look of every call."""
_by_rows: dict[Hashable, RangePlan] = {}
"""Tables by the same, without M."""
_plans: dict[tuple[Problem, int, int], Plan] = {}
_CAPACITY = 65536
LEAST_INVARIANT_ROWS = 256
"""The M up to which a first call looks for the one choice of all; beyond, that is asked of each M whether it is legal."""


@dataclass(slots=True)
class Generation:
    """How often plans were forgotten: what was made of a plan, or of there being none, holds for one number."""

    number: int = 0


generation = Generation()


def forget_plans() -> None:
    """Drop every plan, so that the next call asks the store again."""
    generation.number += 1
    ready.clear()
    _by_rows.clear()
    _plans.clear()
    forget_range_plans()
    forget(generation.number)


def keep_ready(key: Hashable | None, entry: Ready | None) -> None:
    """Let calls with this key have the plan at first look, if there are both."""
    if key is not None and entry is not None and entry.plan.lasting:
        if len(ready) >= _CAPACITY:
            ready.clear()
        ready[key] = entry
        shared = entry.plan.shared
        if shared is not None and entry is entry.plan and (rest := without_rows(key)) is not None:
            if len(_by_rows) >= _CAPACITY:
                _by_rows.clear()
            _by_rows[rest[0]] = shared


def ready_for_rows(key: Hashable) -> Plan | None:
    """The plan for a call whose M is new, where the weight's table has it: nothing has to be stated or asked again."""
    rest = without_rows(key) if _by_rows else None
    shared = _by_rows.get(rest[0]) if rest is not None else None
    found = shared.proved(rest[1]) if shared is not None and rest is not None else None
    if found is None:
        return None
    problem, choice, kernel = found
    plan = Plan(problem=problem, choice=choice, kernel=kernel, origin="range", shared=shared)
    if len(ready) >= _CAPACITY:
        ready.clear()
    ready[key] = plan
    return plan


def plan_for(problem: Problem, index: int) -> Plan:
    """The plan for a problem on the device with that index (-1 for the CPU), under the settings in force.

    Tunes the problem if the settings allow it and the store knows no answer.

    Raises:
        NoValidChoicesError: no choice works and ``fallback_to_aten`` is off.
        ErrorFromChoice: the picked choice cannot be loaded and ``fallback_to_aten`` is off.
    """
    settings = settings_module.current()
    key = (problem, index, settings.token)
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan(problem, detect("cpu" if index < 0 else torch.device("cuda", index)), settings)
        if plan.lasting:
            if len(_plans) >= _CAPACITY:
                _plans.clear()
            _plans[key] = plan
    return plan


def make_plan(problem: Problem, device: DeviceInfo, settings: Settings) -> Plan:
    """A new plan: by what is known of other Ms, from the only choice, from the store, or by tuning, as the settings allow."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing:
        settings = dataclasses.replace(settings, tune="never")
    if settings.batch_invariant:
        return _invariant(problem, device, settings)
    if settings.rows == "shared" and settings.tune != "force":
        shared, settings = _shared(problem, device, settings)
        if shared is not None:
            return shared
    candidates = candidates_for(problem, device, settings, host_us=host_us(device, settings))
    if candidates.only is not None and settings.tune != "force":
        return bound(problem, candidates.only, "only choice", device, settings)
    store = open_store(settings)
    if settings.tune == "never":
        if (choice := candidates.stored_anyhow(store).picked) is not None:
            return bound(problem, choice, "store", device, settings)
        if capturing:
            warnings.warn(
                f"no stored choice for {problem} while a CUDA graph is captured: torch runs. Tune it before.", stacklevel=4
            )
        return dataclasses.replace(fallback(problem, device, settings), lasting=not capturing)
    listener = FirstCall(problem)
    try:
        choice, result = select(candidates, store, listener)
    except NoWorkerError as missing:
        if not settings.fallback_to_aten:
            raise
        warnings.warn(f"{problem} cannot be tuned: {missing}\ntorch runs instead.", stacklevel=4)
        return fallback(problem, device, settings)
    if result.source == "measured":
        forget_range_plans()  # one of them was that nothing is known
        listener.end(result)
    if choice is not None:
        return bound(problem, choice, "store" if result.source == "store" else "tuned", device, settings)
    left_out = [(o.name, str(o.status), o.reason) for o in result.outcomes]
    left_out += [(r.name, "refused", r.reason) for r in result.refusals]
    error = NoValidChoicesError(str(problem), left_out)
    if not settings.fallback_to_aten:
        raise error
    warnings.warn(f"{error}\ntorch runs instead.", stacklevel=4)
    return fallback(problem, device, settings)


def _shared(problem: Problem, device: DeviceInfo, settings: Settings) -> tuple[Plan | None, Settings]:
    """The plan by what is known of other Ms, None where nothing is or this M was tuned for itself; and the settings that hold then.

    With a table nothing is tuned in a call.
    """
    known = range_plan_for(problem, device, settings)
    if known is None:
        return None, settings
    if problem.m in known.tuned:
        return None, settings if known.table is None else dataclasses.replace(settings, tune="never")
    found = known.find(problem)
    if known.table is None or known.table.index(problem.m) is None or isinstance(found, str):
        runs = f"torch runs it ({found})" if isinstance(found, str) else f"{found.choice.name} runs it"
        note(known.rows_class, problem.m, fingerprint_text(device, settings.timing), open_store(settings), runs)
    if isinstance(found, str):
        return fallback(problem, device, settings), settings
    shared = known if known.table is not None else None
    return Plan(problem=problem, choice=found.choice, kernel=found.kernel, origin=found.origin, shared=shared), settings


def _invariant(problem: Problem, device: DeviceInfo, settings: Settings) -> Plan:
    """The plan by the one choice of all Ms, for which the first call of a weight looks. Torch is no way out: its bits differ.

    Raises:
        NoValidChoicesError: there is none for this M, or none is stored and nothing may be tuned.
    """
    known = range_plan_for(problem, device, settings)
    if known is None and settings.tune != "never":
        rows_class = row_classes(problem)[0]
        rows = range(1, max(LEAST_INVARIANT_ROWS, problem.m) + 1)
        cost_us = host_us(device, settings)
        tune_rows(rows_class, rows, device, settings, open_store(settings), FirstCall(problem), host_us=cost_us)
        forget_range_plans()
        known = range_plan_for(problem, device, settings)
    found = known.find(problem) if known is not None else "nothing is stored, and tune is 'never'"
    if isinstance(found, str):
        made_by = f"{command(row_classes(problem)[0], max(USUAL_ROWS, problem.m))} --batch-invariant"
        remedy = f"Make a table that has it: {made_by}. Torch is no way out: the bits of a row depend on its batch."
        raise NoValidChoicesError(f"{problem}, batch-invariant", [("every choice", "refused", found)], remedy)
    return Plan(problem=problem, choice=found.choice, kernel=found.kernel, origin=found.origin, shared=known)


def fallback(problem: Problem, device: DeviceInfo, settings: Settings) -> Plan:
    """torch's own operation."""
    choices = load("aten").enumerate(problem, device, settings).choices
    if settings.absent_blocks == "skipped":
        choices = [c for c in choices if why_not_skipping(c) is None] or choices
    choice = next((c for c in choices if c.baseline), choices[0])
    return Plan(problem=problem, choice=choice, kernel=choice.build(), origin="fallback")


def bound(problem: Problem, choice: Choice, origin: Origin, device: DeviceInfo, settings: Settings) -> Plan:
    """The choice made ready in this process; torch's own operation, with a warning, if that fails."""
    try:
        return Plan(problem=problem, choice=choice, kernel=choice.build(), origin=origin)
    except (GemmtuneError, RuntimeError, OSError) as error:
        if not settings.fallback_to_aten:
            raise ErrorFromChoice(choice.name, str(problem), f"{type(error).__name__}: {error}") from error
        warnings.warn(f"{choice.name} cannot be loaded ({type(error).__name__}: {error}); torch runs {problem}", stacklevel=5)
        return fallback(problem, device, settings)
