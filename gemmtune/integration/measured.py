"""Measurement of the products of a model: between other kernels, with a table for each weight, and with an epilogue among few
candidates.

A product that runs repeatedly may begin while the previous run ends, which saves up to 4 µs. In a model it runs between other
kernels. These allow the overlap only if Inductor compiles them with its option ``triton.enable_pdl``.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from ..backends.triton.arch import can_overlap
from ..device import DeviceInfo
from ..dispatch.host import host_us
from ..dispatch.ready import forget_plans
from ..errors import NoValidChoicesError
from ..problem import Problem
from ..problem.rows import RowClass
from ..selector.candidates import Candidates, candidates_for
from ..selector.precompile import prepare_compiling
from ..selector.progress import Progress
from ..selector.ranges import missing_kernels, tune_rows
from ..selector.remote import import_meanwhile, prepare_measuring
from ..selector.siblings import Siblings
from ..settings import Settings, use
from ..store.store import open_store
from ..tuning.tune import MOST_RECORDED, tuned

log = logging.getLogger("gemmtune")

LEAST_ROWS = {"cpu": 16, "cuda": 256}
"""Least end of a weight's table by device. A run of one prompt shows a single M, and other prompts and batches follow."""
MOST_COMPARED = 4
"""Ms of an example at which all choices of a weight compete: those with the most FLOPs."""
INDUCTOR = "torch._inductor.compile_fx"
"""The module that the measuring process needs to time Inductor's kernels. Its import takes seconds, while a model is traced."""


def in_models(settings: Settings, device: DeviceInfo) -> Settings:
    """Return the settings with ``timing="spaced"`` instead of ``graph`` on a GPU, unless Inductor's kernels overlap there."""
    if device.type == "cpu" or settings.timing != "graph" or inductor_overlaps(device):
        return settings
    return dataclasses.replace(settings, timing="spaced")


def inductor_overlaps(device: DeviceInfo) -> bool:
    """Return True if consecutive kernels that Inductor compiles for the device may overlap under its current options."""
    if not can_overlap(device.capability):
        return False
    from torch._inductor import config  # noqa: PLC0415 - takes seconds, which products without a GPU do not need

    return bool(config.triton.enable_pdl)


def prepare_tuning(device: DeviceInfo, settings: Settings) -> None:
    """Start the tuning processes before the problems are known. Their imports take seconds."""
    if settings.tune_in_subprocess:
        prepare_measuring(device, settings)
    if device.type != "cpu":
        prepare_compiling(settings)


def without_epilogue(problem: Problem) -> Problem:
    """Return the Problem without its epilogue, with its default result dtype."""
    dtype = problem.operation.result_dtype(problem.dtype, epilogue=False)
    return dataclasses.replace(problem, epilogue=None, out=dataclasses.replace(problem.out, dtype=dtype))


def candidates_in_models(problem: Problem, device: DeviceInfo, settings: Settings) -> Candidates:
    """Return the candidates for a product of a model. With an epilogue, only the best ones without it if these were measured."""
    cost_us = host_us(device, settings)
    found = candidates_for(problem, device, settings, host_us=cost_us)
    if problem.epilogue is None:
        return found
    alone = candidates_for(without_epilogue(problem), device, settings, host_us=cost_us).stored(open_store(settings))
    return found.narrowed(alone)


def tune_products(problems: Iterable[Problem], device: DeviceInfo, settings: Settings, progress: Progress) -> None:
    """Tune products of a model on a device, products with an epilogue last. Stored times are not measured again.

    Products with K = 1 stay torch's: they sum nothing, and Inductor compiles them as pointwise operations. Nothing is tuned where
    the settings disable gemmtune.
    """
    if settings.disable:
        return
    distinct = [p for p in dict.fromkeys(problems) if p.device_type == device.type and p.k > 1]
    with use(settings):
        try:
            for fused in (False, True):
                wanted = [p for p in distinct if (p.epilogue is not None) == fused]
                candidates = [candidates_in_models(p, device, settings) for p in wanted]
                for _ in tuned(candidates, progress, limits=False):
                    pass
        finally:
            progress.close()
            forget_plans()
            import_meanwhile(device, INDUCTOR)


def tune_tables(
    tables: Mapping[RowClass, Sequence[int]], device: DeviceInfo, settings: Settings, progress: Progress, rows: range | None = None
) -> None:
    """Make the table of each class of a model's weights for ``rows``, by default from 1 row to more than the class's own Ms.

    The Ms of a class are sampled in addition to the grid, the first of them by all choices. A table that the store has, for these
    Ms or more, is kept. Torch runs a weight for which no choice is correct. The kernels of the next class compile while one is
    measured.
    """
    if settings.disable or not tables:
        return
    ends = {x: rows or range(1, rounded_up(max(shown, default=1), device) + 1) for x, shown in tables.items()}
    asked = [(x, here, [m for m in tables[x] if m in here][:MOST_COMPARED]) for x, here in ends.items()]
    with use(settings), Siblings(device, settings) as siblings:
        tune = functools.partial(tune_rows, host_us=host_us(device, settings), apart=apart_on(device), siblings=siblings)
        try:
            for (rows_class, here, compared), following in zip(asked, [*asked[1:], None], strict=True):
                siblings.then(following and functools.partial(missing_kernels, *following, device, settings, siblings))
                recorded = sorted(set(tables[rows_class]).intersection(here))[:MOST_RECORDED]
                try:
                    tune(rows_class, here, device, settings, progress, recorded=recorded, compared=compared)
                except NoValidChoicesError as error:
                    log.warning("torch runs %s: %s", rows_class, error)
        finally:
            progress.close()
            forget_plans()


def apart_on(device: DeviceInfo) -> float | None:
    """Return the factor between the Ms at which all choices compete. Kernels for a CPU take seconds to compile, and are few."""
    return math.inf if device.type == "cpu" else None


def rounded_up(m: int, device: DeviceInfo) -> int:
    """Return the end of the table for an example with ``m`` rows: a power of two, so that similar examples ask for one table."""
    return max(1 << (m - 1).bit_length(), LEAST_ROWS[device.type])
