"""The native look-up of this process: loaded if it is built, otherwise built in the background."""

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
"""Seconds without a new plan before the compiler starts. Earlier it would disturb the measurements of a tuning."""


@dataclass(slots=True)
class LookUp:
    """The look-up of this process, or its absence.

    ``call(name, out, epilogue, epilogue_args, scalars, options, brought, out_dtype, *operands)`` returns the result of a call by a
    kept record or by Python. It is None without the module. ``layer(input, weight, bias)`` returns input @ weight.t() + bias by a
    kept record. It returns False if there is no record, and None if Python must look closer.

    ``state`` describes the progress for users. ``asked_at`` is the time of the last new plan. ``generation`` is that of valid
    plans.
    """

    call: Callable[..., Any] | None = None
    layer: Callable[..., Any] | None = None
    module: Any = None
    state: str = "not requested yet"
    begun: bool = False
    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock)
    asked_at: float = 0.0
    generation: int = 0


native = LookUp()


def _after_fork() -> None:
    """Reset a forked child: it has no compiling thread, and another thread may have held the lock."""
    native.lock = threading.RLock()
    native.begun = native.module is not None


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """Functions and types that the look-up needs from the modules above it.

    ``in_python(missing, *arguments)`` runs every call that the look-up cannot. ``missing`` is True if it lacks a record for the
    call. ``meaning_of`` an epilogue and the type of a prepacked operand are parts of the key.
    """

    in_python: Callable[..., Any]
    meaning_of: Callable[[Callable[..., Any]], Hashable | None]
    packed_type: type


def prepare(above: Above, chosen: settings.Settings) -> None:
    """Load the look-up after a new plan, or compile it in the background if the settings allow it and this process tunes."""
    native.asked_at = time.monotonic()
    if not chosen.native:
        return
    with native.lock:
        if native.begun:
            return
        if build.made() is not None:
            load(above)
        elif chosen.tune != "never" and build.why_impossible() is None:
            native.begun, native.state = True, "being compiled in the background"
            threading.Thread(target=_compile, args=(chosen, above), name="gemmtune-native", daemon=True).start()


def load(above: Above) -> None:
    """Install the module, compiled if it is missing. Log a failure once; Python then serves all calls."""
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
    """Wait for the end of a series of tunings, compile, and install the module."""
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
    log.warning("the C++ look-up is unavailable, so each call takes a few microseconds more: %s", error)


def keep(generation: int, entry: Any, arguments: tuple[Any, ...]) -> None:
    """Let calls with these arguments find the entry, unless plans have been dropped since its look-up."""
    if settings.current().native:
        native.module.keep(generation, record_of(entry), *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The Ms that one kernel serves. ``plan_at`` returns the plan for each, or None if there is none."""

    rows: range
    plan_at: Callable[[int], Any]

    def prepared_at(self, m: int) -> Prepared | None:
        plan = self.plan_at(m)
        return None if plan is None else plan.kernel.prepared


def rows_served(generation: int, arguments: tuple[Any, ...], following: int, runs: Callable[[], Iterable[Run]]) -> bool:
    """Let calls that differ from these arguments only in M find the kernel for their M, unless plans have been dropped since.

    The arguments are those of ``call``, or of ``layer``, whose input has any number of rows. ``following`` has a bit for each
    tensor with M rows. ``runs`` are in the order of their Ms. Runs whose launches follow M in no known way are skipped. Return
    False if Python must serve such calls, or if they are known already.
    """
    if not settings.current().native or native.module.rows_of(*arguments) != following:
        return False
    return bool(native.module.keep_rows(generation, _records(runs()), *arguments))


def _records(runs: Iterable[Run]) -> tuple[tuple[object, ...], ...]:
    found = (_record_of_part(run, part) for run in runs for part in alike(run.prepared_at, run.rows))
    return tuple(x for x in found if x is not None)


def _record_of_part(run: Run, rows: range) -> tuple[object, ...] | None:
    """Return the record for these Ms. None if some launch contradicts the rule derived from a few of them."""
    plan, of_rows = run.plan_at(rows[-1]), learned(run.prepared_at, rows)
    reason: str | None = "no rule is known by which launches follow M"
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
    """Let layers with operands like (input, weight, bias) find the plan, or torch's operation if the plan is None.

    ``capture_info`` is the address of the driver's function of that name. While a graph is captured, Python serves the layer.
    """
    if settings.current().native:
        native.module.keep_layer(generation, None if plan is None else record_of(plan), capture_info, *operands)


def forget(generation: int) -> None:
    """Drop all records, because plans of an older generation are invalid."""
    with native.lock:
        native.generation = generation
        if native.module is not None:
            native.module.forget(generation, settings.from_environment().token)
