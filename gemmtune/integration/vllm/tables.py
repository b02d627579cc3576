"""Which layers of vLLM our tables serve. Everything is decided while vLLM loads a model, and nothing is tuned."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
from .points import Points

log = logging.getLogger("vllm.gemmtune")
USUAL_ROWS = 8192
"""Rows of the table that the log proposes, and that a batch-invariant table must serve, where vLLM names no maximum."""
INVARIANT = "batch-invariant products are asked for, which gemmtune has here only for weights that are not quantized"
"""The reason why our kernels leave a quantized layer to vLLM under ``VLLM_BATCH_INVARIANT``."""
PACKED = "vLLM packs its weights on a CPU and is faster with them; set GEMMTUNE_VLLM=all to run by gemmtune's tables anyway"
KEY = "gemmtune"
"""Entry of vLLM's ``additional_config`` with the layers that we run. It is part of the key of vLLM's compiled graphs."""


def unserved_quantized(op: str, size: tuple[int, int], words: Mapping[str, Any], points: Points, *, defaults: bool) -> str:
    """Do what ``unserved`` does for a quantized weight of ``size`` [N, K], described by the keywords of a Problem's constructor."""
    given = dict(words) | {"device_type": points.device_type}
    text = f"gemmtune.Problem.{op}({ROWS}, {size[0]}, {size[1]}, {', '.join(f'{word}={value!r}' for word, value in given.items())})"

    def state() -> Problem:
        made: Problem = getattr(Problem, op)(ROWS, *size, **given)
        return made

    return unserved(state, points, defaults=defaults, made_by=f"gemmtune.tune({text}, m=range(1, {_most_rows(points) + 1}))")


def unserved(state: Callable[[], Problem], points: Points, *, defaults: bool, made_by: str = "") -> str:
    """Return the reason why no table of ours serves a layer, or an empty text if one does.

    ``state`` returns the layer's product with some rows, and ``made_by`` is what makes the table, by default a shell command.
    With ``defaults`` a table that was not measured counts, and one is made and stored where that is possible.
    """
    with _usual():
        try:
            rows_class = row_classes(state())[0]
        except InvalidProblemError as error:
            return str(error)
        return _unserved_class(rows_class, points, defaults, made_by)


def _unserved_class(rows_class: RowClass, points: Points, defaults: bool, made_by: str) -> str:
    """Return the reason of ``unserved`` for a class, make a default table if that may help, and log the outcome."""
    device, current = here(points), settings.current()
    if device.type == "cpu" and current.vllm != "all":
        return PACKED
    if current.disable or current.rows != "shared":
        return "gemmtune's settings disable it" if current.disable else "the setting rows='exact' uses no table"
    defaults &= device.type != "cpu"
    current = in_models(current, device)
    if invariant(points):
        current = dataclasses.replace(current, batch_invariant=True)
    made_by = made_by or command(rows_class, _most_rows(points), batch_invariant=current.batch_invariant)
    reason = _unserved(rows_class, device, current, points, defaults, made_by)
    if reason and defaults and not current.batch_invariant and origin_for(rows_class, device):
        _make(rows_class, device)
        reason = _unserved(rows_class, device, current, points, defaults, made_by)
    _log_once("vLLM runs %s: %s" if reason else "gemmtune runs %s%s", str(rows_class), reason)
    return reason


def _unserved(rows_class: RowClass, device: DeviceInfo, current: Settings, points: Points, defaults: bool, made_by: str) -> str:
    plan = range_plan_for(rows_class.problem, device, current)
    if plan is None or plan.table is None:
        return f"no {'batch-invariant ' if current.batch_invariant else ''}table of {rows_class} is stored; make one by: {made_by}"
    if plan.by_rule and not defaults:
        return f"the table of {rows_class} was not measured; make one by: {made_by}, or set GEMMTUNE_VLLM=all"
    if current.batch_invariant:
        found = plan.find(rows_class.at(_most_rows(points)))
        return "" if isinstance(found, Found) else found
    if all(isinstance(x.choice, str) or x.choice.baseline for x in plan.members):
        return f"torch is the fastest in the table of {rows_class}"
    return ""


@contextmanager
def _usual() -> Iterator[None]:
    """Remove vLLM's default dtype and device for new tensors for a block, under which it makes its layers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def _make(rows_class: RowClass, device: DeviceInfo) -> None:
    """Make the default table of a class, once. The processes that verify it end, since vLLM measures free memory next."""
    try:
        make_defaults(device, [rows_class], Progress())
    finally:
        WORKERS.close()


def invariant(points: Points) -> bool:
    """Return True if the bits of a row must not depend on its batch, by vLLM's switch or by our setting."""
    return points.batch_invariant or settings.current().batch_invariant


def here(points: Points) -> DeviceInfo:
    """Return the device of this process of vLLM."""
    return detect("cpu" if points.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device()))


def _most_rows(points: Points) -> int:
    """Return the most rows of a batch, by vLLM's configuration."""
    return int(getattr(getattr(points.config(), "scheduler_config", None), "max_num_batched_tokens", None) or USUAL_ROWS)


def note(points: Points, layer: str) -> bool:
    """Make a layer that we run part of the key of vLLM's compiled graphs. Return False where vLLM has no place for it."""
    config: Any = getattr(points.config(), "additional_config", None)
    if not isinstance(config, dict):
        _log_once("vLLM runs %s: its additional_config is no dict, so the key of its compiled graphs cannot have the layer", layer)
        return False
    config[KEY] = sorted({*config.get(KEY, ()), layer})
    return True


@functools.cache
def _log_once(text: str, *arguments: str) -> None:
    log.info(text, *arguments)
