"""Stored picks that beat torch, for calls that never tune."""

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from .. import settings as settings_module
from ..choice import Scalars
from ..device import DeviceInfo, detect
from ..dispatch.arguments import call_of
from ..dispatch.checks import why_not_ours
from ..dispatch.host import host_us
from ..dispatch.plan import Plan
from ..dispatch.ranges import Found, RangePlan, range_plan_for
from ..dispatch.ready import generation
from ..dispatch.statement import stated as stated_call
from ..dispatch.strategies import bound
from ..errors import InvalidProblemError, NoValidChoicesError
from ..problem import Problem
from ..problem.fused import NAMES
from ..problem.operations import DENSE_OPS
from ..selector.candidates import candidates_for
from ..selector.pick import pick
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import open_store
from .measured import in_models

Tensor = torch.Tensor
LAUNCH_US = 140.0
"""Minimum torch time of a product for which a pick pays outside of CUDA graphs. Below it the host is the bottleneck.

The host needs 1 ms to launch a layer of a Llama, which has seven products. Measured on an H200: eight layers take 7.9 ms at one
token, and 2.2 ms in a graph.
"""
_CAPACITY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A stored pick that is faster than torch's operation."""

    plan: Plan
    saves_us: float
    """Measured time of torch's operation minus that of the pick."""
    in_graph_only: bool
    """True if torch's kernel is shorter than its launch on the host. The pick is then faster only when a CUDA graph replays it."""

    @property
    def serves_now(self) -> bool:
        """True if the pick is faster now: during a capture, or in general."""
        return not self.in_graph_only or torch.cuda.is_current_stream_capturing()


def pick_for(op: str, tensors: Sequence[Tensor], scalars: Scalars = (), options: Sequence[Hashable] = ()) -> Pick | None:
    """Return the pick for a call on these tensors, in the order of the operation's row, or None for torch.

    For an M that was not measured, the pick comes from the weight's table. Nothing is tuned, and only stored picks are compiled.
    """
    info, settings = _where(tensors), settings_module.current()
    problem = stated(op, tensors, scalars, options)
    if problem is None:
        return None
    if settings.batch_invariant:
        return _invariant_pick(problem, info, settings)
    if problem.key in _known(info, settings.token, generation.number):
        return stored_pick(problem, info, settings, generation.number)
    shared = _table_of(problem, info, settings)
    found = shared.find(problem) if shared is not None and shared.serves(problem.m) else None
    if not isinstance(found, Found) or found.choice.baseline:
        return None
    plan = Plan(problem=problem, choice=found.choice, kernel=found.kernel, origin=found.origin, shared=shared)
    # torch's time is known for few values of M only, so that every product of a GPU counts as short.
    return Pick(plan=plan, saves_us=0.0, in_graph_only=info.type != "cpu" and settings.timing != "eager" and op in DENSE_OPS)


def _invariant_pick(problem: Problem, info: DeviceInfo, settings: Settings) -> Pick:
    """Return the pick of the batch-invariant table, whatever torch takes. Raises NoValidChoicesError if none serves this M."""
    shared = _table_of(problem, info, settings)
    found = shared.find(problem) if shared is not None else "no batch-invariant table is stored for this weight"
    if isinstance(found, str):
        remedy = "Make it: gemmtune.tune(…, m=range(…), batch_invariant=True), or optimize(model, tune=…, batch_invariant=True)."
        raise NoValidChoicesError(f"{problem}, batch-invariant", [("every choice", "refused", found)], remedy)
    plan = Plan(problem=problem, choice=found.choice, kernel=found.kernel, origin=found.origin, shared=shared)
    return Pick(plan=plan, saves_us=math.inf, in_graph_only=False)


def table_for(op: str, tensors: Sequence[Tensor], scalars: Scalars = ()) -> RangePlan | None:
    """Return the stored table for calls that differ from this one only in M, or None without a table."""
    problem = stated(op, tensors, scalars, ())
    return None if problem is None else _table_of(problem, _where(tensors), settings_module.current())


def _where(tensors: Sequence[Tensor]) -> DeviceInfo:
    index = tensors[0].get_device()
    return detect("cpu" if index < 0 else torch.device("cuda", index))


def stated(op: str, tensors: Sequence[Tensor], scalars: Scalars, options: Sequence[Hashable]) -> Problem | None:
    """Return the problem of a call, or None if torch must run it or report its error."""
    row = NAMES[op]
    if why_not_ours(tensors, floats=row.floats) is not None or not all(x.numel() for x in tensors[:2]):
        return None
    try:
        call = call_of(op, dict(zip((x.role for x in row.operands), tensors, strict=False)), scalars=scalars, options=options)
        return stated_call(call)
    except InvalidProblemError:
        return None


def _table_of(problem: Problem, info: DeviceInfo, settings: Settings) -> RangePlan | None:
    shared = range_plan_for(problem, info, in_models(settings, info)) if settings.rows == "shared" else None
    return shared if shared is not None and shared.table is not None else None


@functools.lru_cache(_CAPACITY)
def _known(info: DeviceInfo, token: int, _generation: int) -> frozenset[str]:
    """Return the key of every problem that the store has for the device."""
    settings = settings_module.current()
    assert settings.token == token
    timings = {settings.timing, in_models(settings, info).timing}
    return frozenset(key for timing in timings for key in open_store(settings).keys(fingerprint_text(info, timing)))


@functools.lru_cache(_CAPACITY)
def stored_pick(problem: Problem, info: DeviceInfo, settings: Settings, _generation: int) -> Pick | None:
    """Return the stored pick for a problem, ready to run, or None if torch's operation is the fastest."""
    settings = in_models(settings.never_tuning, info)
    candidates = candidates_for(problem, info, settings, host_us=host_us(info, settings)).stored_anyhow(open_store(settings))
    chosen, outcome = candidates.picked, pick(list(candidates.known.values()))
    if chosen is None or outcome is None or chosen.baseline:
        return None
    torch_us = next((o.time_us for o in candidates.known.values() if o.baseline), None)
    time_us = outcome.time_us
    if torch_us is None or time_us is None or torch_us <= time_us:
        return None
    plan = bound(problem, chosen, "store", info, settings)
    # Operations that torch runs as several kernels cost the host more than ours.
    short = info.type != "cpu" and settings.timing != "eager" and problem.op in DENSE_OPS and torch_us < LAUNCH_US
    return None if plan.choice.baseline else Pick(plan=plan, saves_us=torch_us - time_us, in_graph_only=short)
