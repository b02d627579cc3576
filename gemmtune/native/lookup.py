"""The native look-up in this process: loaded when it is there, built in the background when it is not."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import profiler

from .. import settings
from ..choice import Prepared
from ..errors import GemmtuneError
from . import build
from .following import alike, learned, rows_to_compare, why_apart
from .records import launch_of, record_of, record_of_rows

log = logging.getLogger("gemmtune")
QUIET_S = 10.0
"""The compiler is started when no new plan was made for so long: it would disturb the measurements of a tuning."""


@dataclass(slots=True)
class LookUp:
    """``call(name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands)`` is the result of a call, by
    what was kept or by Python; None without the module. ``layer(input, weight, bias)`` is input @ weight.t() + bias by what was
    kept; False where nothing was, None where it has to be looked at more closely.

    ``state`` tells how far it is. ``asked_at`` is when a plan was last made, ``generation`` that of the plans that hold.
    """

    call: Callable[..., Any] | None = None
    layer: Callable[..., Any] | None = None
    module: Any = None
    state: str = "not asked for yet"
    begun: bool = False
    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock)
    asked_at: float = 0.0
    generation: int = 0


native = LookUp()


def _after_fork() -> None:
    """A child has neither the thread that compiles nor what may have held the lock."""
    native.lock = threading.RLock()
    native.begun = native.module is not None


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """What the look-up needs of the modules above it.

    ``in_python(missing, *arguments)`` does every call that it does not do itself, ``missing`` where it would if the call was kept.
    ``meaning_of`` an epilogue and the type of a prepacked operand are for the key.
    """

    in_python: Callable[..., Any]
    meaning_of: Callable[[Callable[..., Any]], Hashable | None]
    packed_type: type


def prepare(above: Above) -> None:
    """See to the look-up after a new plan was made, as the settings allow: load it, or have it compiled in the background.

    A process that tunes nothing compiles nothing.
    """
    native.asked_at = time.monotonic()
    chosen = settings.current()
    if not chosen.native:
        return
    with native.lock:
        if native.begun:
            return
        try:
            made = build.made()
        except (GemmtuneError, OSError) as error:  # a cache folder that cannot be used is no reason to fail a call
            native.begun = True
            _fail(error)
            return
        if made is not None:
            load(above)
        elif chosen.tune != "never" and build.why_impossible() is None:
            native.begun, native.state = True, "being compiled in the background"
            threading.Thread(target=_compile, args=(chosen, above), name="gemmtune-native", daemon=True).start()


def load(above: Above) -> None:
    """Put the module in place, compiled if it is missing. What is wrong with it is told once; Python then serves for ever."""
    with native.lock:
        native.begun = True
        try:
            module = build.load()
        except (GemmtuneError, OSError) as error:
            _fail(error)
            return
        module.surround(settings.patched, above.in_python, above.meaning_of, above.packed_type, vars(profiler))
        module.forget(native.generation, settings.from_environment().token)
        native.module, native.call, native.layer, native.state = module, module.look_up, module.layer, "in use"


def _compile(chosen: settings.Settings, above: Above) -> None:
    """Wait for the end of a series of tunings, compile, and put the module in place."""
    while (rest := native.asked_at + QUIET_S - time.monotonic()) > 0:
        time.sleep(rest)
    with settings.use(chosen):
        try:
            build.make(quietly=True)
        except GemmtuneError as error:
            _fail(error)
        else:
            load(above)


def _fail(error: Exception) -> None:
    native.state = f"failed: {error}"
    log.warning("the native look-up is not used, a call costs a few microseconds more: %s", error)


def keep(generation: int, entry: Any, arguments: tuple[Any, ...]) -> None:
    """Let calls with these arguments find the entry, unless plans were forgotten since that was looked up."""
    if settings.current().native:
        native.module.keep(generation, record_of(entry), *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The Ms that one kernel serves: ``plan_at`` has the plan for each, None where there is none."""

    rows: range
    plan_at: Callable[[int], Any]

    def prepared_at(self, m: int) -> Prepared | None:
        """What the launch for an M is prepared to be."""
        plan = self.plan_at(m)
        return None if plan is None else plan.kernel.prepared


def rows_served(generation: int, arguments: tuple[Any, ...], following: int, runs: Callable[[], Iterable[Run]]) -> bool:
    """Let calls that differ from these arguments in M alone find what serves their M, unless plans were forgotten since.

    The arguments are those of ``call`` or of ``layer``, whose forwards have any number of rows.
    ``following`` has a bit for each tensor that has M rows. Of the ``runs``, in the order of their Ms, those whose launches follow
    M in no known way are left out. False where such calls are Python's, or known already.
    """
    if not settings.current().native or native.module.rows_of(*arguments) != following:
        return False
    return bool(native.module.keep_rows(generation, _records(runs()), *arguments))


def _records(runs: Iterable[Run]) -> tuple[tuple[object, ...], ...]:
    found = (_record_of_part(run, part) for run in runs for part in alike(run.prepared_at, run.rows))
    return tuple(x for x in found if x is not None)


def _record_of_part(run: Run, rows: range) -> tuple[object, ...] | None:
    """The record for these Ms; None where launches do not follow M as was learned of a few of them."""
    plan, of_rows = run.plan_at(rows[-1]), learned(run.prepared_at, rows)
    reason: str | None = "it is not known how launches follow M"
    if of_rows is not None:
        launch = launch_of(of_rows)
        compared = (
            (m, why_apart(run.prepared_at(m), of_rows, native.module.rehearse(*launch, m))) for m in rows_to_compare(of_rows, rows)
        )
        reason = next((f"at M = {m}, {why}" for m, why in compared if why is not None), None)
        if reason is None:
            return record_of_rows(plan, rows, of_rows)
    log.debug("%s: calls of M = %d to %d are bound by Python: %s", plan and plan.choice.name, rows[0], rows[-1], reason)
    return None


def keep_layer(generation: int, plan: Any, capture_info: int, operands: tuple[Any, ...]) -> None:
    """Let the forwards of layers with (input, weight, bias) like these find the plan, or torch's operation where that is None.

    With the address ``capture_info`` of the driver's function of that name, Python has the say while a graph is captured.
    """
    if settings.current().native:
        native.module.keep_layer(generation, None if plan is None else record_of(plan), capture_info, *operands)


def forget(generation: int) -> None:
    """Drop everything that is kept: plans of an older generation hold no more."""
    with native.lock:
        native.generation = generation
        if native.module is not None:
            native.module.forget(generation, settings.from_environment().token)
