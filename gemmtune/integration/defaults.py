"""Tables for the layers of a model that nobody tuned: shipped, predicted or by rule, and verified on this machine."""

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from .. import settings
from ..device import DeviceInfo, detect
from ..dispatch.checks import is_dense
from ..dispatch.ranges import forget_range_plans, range_plan_for
from ..dispatch.ready import forget_plans
from ..errors import NoValidChoicesError, ShortMemoryError
from ..problem import Problem
from ..problem.rows import RowClass, row_classes
from ..quantized.weight import QuantizedWeight
from ..selector.defaults import defaults_for, origin_for
from ..selector.precompile import prepare_compiling
from ..selector.predicted import MOST_KERNELS
from ..selector.progress import Progress, notify, progress_for
from ..selector.remote import prepare_measuring
from ..selector.segments import DEFAULT, FOR_GRAPHS
from ..settings import Settings
from ..store.store import open_store
from ..workers.worker import NoWorkerError
from .adjacent import alike_siblings
from .eager import scalars_of
from .experts import is_experts
from .measured import in_models
from .modules import is_conv1d, is_linear
from .picks import stated

log = logging.getLogger("gemmtune")
ROWS = 16
"""Rows of the product that states a weight's class: a multiple of 16, like the rows of most batches."""
STAGE = "default kernels"


def verify_defaults(model: nn.Module, *, progress: bool) -> None:
    """Make a default table for each class of layers of a model that has no table yet, and store it.

    Every choice is compiled and verified here, once for a machine. Torch runs a layer whose table cannot be made.
    """
    for device, classes in _classes(model).items():
        make_defaults(device, classes, progress_for() if progress else Progress())


def make_defaults(device: DeviceInfo, classes: Sequence[RowClass], shown: Progress, kind: str = DEFAULT) -> None:
    """Make the default tables of classes on a device, and store them. Torch runs a class whose table cannot be made."""
    current = settings.current()
    # Processes import their modules while choices are listed, and this one imports Inductor while they compile.
    start_processes(device, current)
    import_inductor = functools.partial(in_models, current, device)
    try:
        shown.stage(STAGE, 0, len(classes))
        # An interruption ends the compilations.
        with contextlib.closing(defaults_for(classes, device, current, shown, import_inductor)) as found:
            for number, default in enumerate(found, 1):
                default.work.settings = chosen = in_models(current, device)
                try:
                    default.stored(open_store(chosen), kind)
                except (NoValidChoicesError, NoWorkerError) as error:
                    log.warning("torch runs %s where it is not tuned: %s", default.work.rows_class, error)
                shown.stage(STAGE, number, len(classes))
        shown.stage(STAGE, len(classes), len(classes))
    finally:
        shown.close()
        forget_range_plans()
        forget_plans()


def joinable(model: nn.Module) -> list[list[nn.Module]]:
    """Return the groups of layers on a GPU that a compiled graph may join without a measurement, by the model's structure alone.

    Such a graph needs a default table for all columns of a group. Where kinds of weights have none, nothing would be gained.
    """
    current = settings.current()
    if current.batch_invariant or current.rows != "shared" or torch.version.hip is not None:
        return []
    return [layers for layers in alike_siblings(model) if _has_defaults(layers[0])]


def _has_defaults(layer: nn.Module) -> bool:
    """Return True if weights like that of a linear layer have default tables on its GPU."""
    weight = layer._parameters["weight"]
    if weight is None or not weight.is_cuda:
        return False
    with torch.no_grad():
        problem = _quantized(weight) if isinstance(weight, QuantizedWeight) else _dense(layer, weight)
    return problem is not None and any(origin_for(x, detect(weight.device)) for x in row_classes(problem))


def make_missing(device: DeviceInfo, problems: Iterable[Problem]) -> None:
    """Make the default tables of joined products that have no table, once in a process. Where it fails, there is none."""
    current, wanted = settings.current(), dict[RowClass, None]()
    for rows_class in (x for problem in problems for x in row_classes(problem)[:1]):
        attempt = (rows_class, device, current.token)
        if attempt not in _attempts and origin_for(rows_class, device) and not _has_table(rows_class, device, current):
            wanted[rows_class] = None
        _attempts.add(attempt)
    if wanted:
        notify(f"verifying likely choices for {', '.join(map(str, wanted))}: once, later processes reuse the tables")
        try:
            make_defaults(device, list(wanted), Progress(), FOR_GRAPHS)
        except ShortMemoryError as error:
            log.warning("products of one input are not joined: %s", error)


_attempts: set[tuple[RowClass, DeviceInfo, int]] = set()
"""Classes for which ``make_missing`` made a table, or found that there is none."""


def start_processes(device: DeviceInfo, current: Settings) -> None:
    """Start the processes that verify default tables, and for a GPU those that compile. Compilers of a CPU start when needed."""
    if current.tune_in_subprocess:
        prepare_measuring(device, current, timed=False)
    if device.type != "cpu":
        prepare_compiling(current, MOST_KERNELS)


def _classes(model: nn.Module) -> dict[DeviceInfo, list[RowClass]]:
    """Return the classes of the model's layers that have a default table here and no table as good, by device."""
    current, found = settings.current(), dict[DeviceInfo, dict[RowClass, None]]()
    if current.batch_invariant or current.rows != "shared":
        return {}
    for problem, device in _problems(model):
        for rows_class in row_classes(problem):
            if origin_for(rows_class, device) and not _has_table(rows_class, device, current):
                found.setdefault(device, {})[rows_class] = None
    return {device: list(classes) for device, classes in found.items()}


def _problems(model: nn.Module) -> Iterator[tuple[Problem, DeviceInfo]]:
    """Yield the product of each layer, and of quantized experts on a CPU, with some rows, and their device."""
    for module in model.modules():
        for weight in module._parameters.values() if is_experts(module) else (module._parameters.get("weight"),):
            if not isinstance(weight, torch.Tensor) or isinstance(weight, nn.UninitializedParameter) or weight.dim() not in (2, 3):
                continue
            on_cpu = weight.device.type == "cpu"
            if not weight.is_cuda and not on_cpu:
                continue
            with torch.no_grad():
                problem = _quantized(weight) if isinstance(weight, QuantizedWeight) else _dense(module, weight)
            if problem is not None and (on_cpu or not problem.groups):
                yield problem, detect(weight.device)


def _quantized(weight: QuantizedWeight) -> Problem | None:
    """Return the product of a quantized weight, or of those of experts, with some rows."""
    if weight.tensor.is_floating_point() or (weight.dim() == 2 and not weight.transposed):
        return None
    rows = torch.empty(ROWS, weight.shape[-1 if weight.transposed else -2], dtype=weight.dtype, device=weight.device)
    parts = [rows, *weight.parts]
    if weight.dim() == 2:
        return stated("mixed_mm", parts, (), (weight.encoding,))
    ends = torch.full(weight.shape[:1], ROWS, dtype=torch.int32, device=weight.device)
    return stated("mixed_grouped_mm", [*parts, ends], (), (weight.encoding,))


def _dense(module: nn.Module, weight: torch.Tensor) -> Problem | None:
    """Return the product of a Linear or of HF's Conv1D with some rows, as its forward states it."""
    if not is_dense(weight) or (not is_linear(module) and not is_conv1d(module)):
        return None
    b, bias = weight.t() if is_linear(module) else weight, getattr(module, "bias", None)
    rows = torch.empty(ROWS, b.shape[0], dtype=weight.dtype, device=weight.device)
    op, parts = ("mm", [rows, b]) if bias is None else ("addmm", [rows, b, bias])
    return stated(op, parts, scalars_of(op), ())


def _has_table(rows_class: RowClass, device: DeviceInfo, current: Settings) -> bool:
    """Return True for a measured table, and for a default one of the same origin as a new one, timed without disturbance if at all.

    A plan has the table of either timing of kernels. ``in_models`` imports Inductor to know which comes first, so it comes last.
    """
    if range_plan_for(rows_class.problem, device, current) is None:
        return False
    known = range_plan_for(rows_class.problem, device, in_models(current, device))
    if known is None or known.table is None:
        return False
    if not known.by_rule:
        return True
    if lost := known.lost(device, current):
        log.info("%s: the stored table is made again: %s", rows_class, lost)
    return not lost and not known.table.disturbed and known.table.origin == origin_for(rows_class, device)
