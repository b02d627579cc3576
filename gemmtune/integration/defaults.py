"""Tables by rule for the quantized weights of a model, so that no number of rows dequantizes a whole weight in each call."""

from __future__ import annotations

import logging

import torch
from torch import nn

from .. import settings
from ..device import detect
from ..dispatch.ranges import forget_range_plans, range_plan_for
from ..dispatch.ready import forget_plans
from ..errors import NoValidChoicesError
from ..problem.rows import RowClass, row_classes
from ..quantized.weight import QuantizedWeight
from ..selector.defaults import default_table
from ..selector.progress import Progress, progress_for
from ..selector.segments import DEFAULT
from ..store.key import fingerprint_text
from ..store.store import Ranged, open_store
from ..workers.worker import NoWorkerError
from .measured import in_models
from .picks import stated

log = logging.getLogger("gemmtune")
ROWS = 16
"""Rows of the product that states a weight's class: a multiple of 16, like the rows of most batches."""


def verify_defaults(model: nn.Module, *, progress: bool) -> None:
    """Make a table by rule for each class of quantized weights of a model on a GPU that has no table yet, and store it.

    Every choice is compiled and verified here, once for a machine. Torch runs a weight whose table cannot be made.
    """
    classes = _classes(model)
    if not classes:
        return
    shown = progress_for() if progress else Progress()
    try:
        for number, rows_class in enumerate(classes):
            shown.stage("default kernels of quantized weights", number, len(classes))
            try:
                _verify(rows_class, shown)
            except (NoValidChoicesError, NoWorkerError) as error:
                log.warning("torch runs %s where it is not tuned: %s", rows_class, error)
        shown.stage("default kernels of quantized weights", len(classes), len(classes))
    finally:
        shown.close()
        forget_plans()


def _classes(model: nn.Module) -> list[RowClass]:
    """Return the classes of the model's quantized layers without a table."""
    found: dict[RowClass, None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, QuantizedWeight) or weight.dim() != 2 or not weight.is_cuda or not weight.transposed:
            continue
        with torch.no_grad():
            rows = torch.empty(ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
            parts = [part for part in (rows, weight.tensor, weight.scales, weight.zero_points) if part is not None]
            problem = None if weight.tensor.is_floating_point() else stated("mixed_mm", parts, (), (weight.encoding,))
        if problem is not None:
            found[row_classes(problem)[0]] = None
    return [rows_class for rows_class in found if not _has_table(rows_class)]


def _has_table(rows_class: RowClass) -> bool:
    device = detect(rows_class.problem.device_type)
    known = range_plan_for(rows_class.problem, device, in_models(settings.current(), device))
    return known is not None and known.table is not None


def _verify(rows_class: RowClass, progress: Progress) -> None:
    device = detect(rows_class.problem.device_type)
    chosen = in_models(settings.current(), device)
    table = default_table(rows_class, device, chosen, progress)
    if table is not None:
        machine = fingerprint_text(device, chosen.timing)
        open_store(chosen).put_ranged(Ranged(key=rows_class.key, fingerprint=machine, kind=DEFAULT, value=table.to_json()))
        forget_range_plans()
