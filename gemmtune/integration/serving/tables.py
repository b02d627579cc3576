"""Decisions about an engine's layers: each runs by a table of ours, or as before. All are made while a model loads. None tunes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ... import settings
from ...device import DeviceInfo, detect
from ...dispatch.asked import command
from ...dispatch.ranges import Found, range_plan_for
from ...errors import InvalidProblemError
from ...problem import Problem
from ...problem.rows import RowClass, row_classes
from ...selector.defaults import origin_for
from ...selector.progress import Progress
from ...settings import Settings
from ...workers.pool import WORKERS
from ..defaults import ROWS, make_defaults
from ..measured import in_models
from .start import logger

USUAL_ROWS = 8192
"""Rows of the table that the log proposes, and that a batch-invariant table must serve, where an engine names no maximum."""
INVARIANT = "batch-invariant products are asked for, which gemmtune has here only for linear layers that are not quantized"
"""The reason why quantized layers and experts stay the engine's if the user asks for batch-invariant products."""


class Engine(Protocol):
    """An inference engine in this process, as far as decisions need it."""

    @property
    def name(self) -> str:
        """Name, such as ``vLLM``, which its setting and its logger have in lower case."""

    @property
    def device_type(self) -> str:
        """Device type of its layers in torch's words, such as ``cuda``."""

    @property
    def batch_invariant(self) -> bool:
        """True if the user asks it for rows whose bits do not depend on their batch."""

    @property
    def most_rows(self) -> int | None:
        """Most rows of a batch, or None if it names no maximum."""


def all_layers(engine: Engine) -> bool:
    """Return True if the user lets all layers run by our tables: on a CPU, and quantized ones by default tables."""
    return bool(getattr(settings.current(), engine.name.lower()) == "all")


def how_to_run_all(engine: Engine) -> str:
    """Return the words that tell how to run all layers by our tables."""
    return f"set GEMMTUNE_{engine.name.upper()}=all"


def unserved_unmeasured(op: str, size: tuple[int, int], words: Mapping[str, Any], engine: Engine, *, copies: int = 1) -> str:
    """Do what ``unserved`` does for a weight of ``size`` [N, K] that needs a measured table.

    ``words`` are keywords of a Problem's constructor. A row of the batch becomes ``copies`` rows of the product.
    """
    given = dict(words) | {"device_type": engine.device_type}
    text = f"gemmtune.Problem.{op}({ROWS}, {size[0]}, {size[1]}, {', '.join(f'{word}={value!r}' for word, value in given.items())})"

    def state() -> Problem:
        made: Problem = getattr(Problem, op)(ROWS, *size, **given)
        return made

    return unserved(
        state, engine, defaults=all_layers(engine), made_by=f"gemmtune.tune({text}, m=range(1, {_most_rows(engine) * copies + 1}))"
    )


def unserved(state: Callable[[], Problem], engine: Engine, *, defaults: bool, made_by: str = "") -> str:
    """Return the reason why no table of ours serves a layer, or an empty text if one does.

    ``state`` returns the layer's product with some rows, and ``made_by`` is what makes the table, by default a shell command.
    With ``defaults`` a table that was not measured counts, and one is made and stored where that is possible.
    """
    with _usual():
        try:
            rows_class = row_classes(state())[0]
        except InvalidProblemError as error:
            return str(error)
        reason = _unserved_class(rows_class, engine, defaults, made_by)
    log_once(engine.name, f"{engine.name} runs {rows_class}: {reason}" if reason else f"gemmtune runs {rows_class}")
    return reason


def _unserved_class(rows_class: RowClass, engine: Engine, defaults: bool, made_by: str) -> str:
    """Return the reason of ``unserved`` for a class, and make a default table if that may help."""
    device, current = here(engine), settings.current()
    if device.type == "cpu" and not all_layers(engine):
        packs = f"{engine.name} packs its weights on a CPU and is faster with them"
        return f"{packs}; {how_to_run_all(engine)} to run by gemmtune's tables anyway"
    if current.disable or current.rows != "shared":
        return "gemmtune's settings disable it" if current.disable else "the setting rows='exact' uses no table"
    defaults &= device.type != "cpu"
    current = in_models(current, device)
    if invariant(engine):
        current = dataclasses.replace(current, batch_invariant=True)
    made_by = made_by or command(rows_class, _most_rows(engine), batch_invariant=current.batch_invariant)
    reason = _unserved(rows_class, device, current, engine, defaults, made_by)
    if reason and defaults and not current.batch_invariant and origin_for(rows_class, device):
        _make(rows_class, device, current.store_file)
        reason = _unserved(rows_class, device, current, engine, defaults, made_by)
    return reason


def _unserved(rows_class: RowClass, device: DeviceInfo, current: Settings, engine: Engine, defaults: bool, made_by: str) -> str:
    plan = range_plan_for(rows_class.problem, device, current)
    if plan is None or plan.table is None:
        return f"no {'batch-invariant ' if current.batch_invariant else ''}table of {rows_class} is stored; make one by: {made_by}"
    if plan.by_rule and not defaults:
        return f"the table of {rows_class} was not measured; make one by: {made_by}, or {how_to_run_all(engine)}"
    if current.batch_invariant:
        found = plan.find(rows_class.at(_most_rows(engine)))
        return "" if isinstance(found, Found) else found
    if all(isinstance(x.choice, str) or x.choice.baseline for x in plan.members):
        return f"torch is the fastest in the table of {rows_class}"
    return ""


@contextmanager
def _usual() -> Iterator[None]:
    """Remove the engine's default dtype and device for new tensors for a block, under which it makes its layers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def _make(rows_class: RowClass, device: DeviceInfo, store: Path) -> None:  # noqa: ARG001 - each store gets its tables
    """Make the default table of a class, once for each store.

    The processes that verify it end, since an engine measures free memory next.
    """
    try:
        make_defaults(device, [rows_class], Progress())
    finally:
        WORKERS.close()


def invariant(engine: Engine) -> bool:
    """Return True if the bits of a row must not depend on its batch, by the engine's switch or by our setting."""
    return engine.batch_invariant or settings.current().batch_invariant


def here(engine: Engine) -> DeviceInfo:
    """Return the device of the engine in this process."""
    return detect("cpu" if engine.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device()))


def _most_rows(engine: Engine) -> int:
    """Return the most rows of a batch, by the engine's configuration."""
    return engine.most_rows or USUAL_ROWS


@functools.cache
def log_once(name: str, line: str) -> None:
    """Log a line of the engine ``name``, the first time that it occurs."""
    logger(name).info("%s", line)
