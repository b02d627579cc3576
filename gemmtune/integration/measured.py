"""Measurement of the products of a model: between other kernels, and with an epilogue among few candidates.

A product that runs repeatedly may begin while the previous run ends, which saves up to 4 µs. In a model it runs between other
kernels. These allow the overlap only if Inductor compiles them with its option ``triton.enable_pdl``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..backends.triton.arch import can_overlap
from ..device import DeviceInfo
from ..dispatch.host import host_us
from ..dispatch.ready import forget_plans
from ..problem import Problem
from ..selector.candidates import Candidates, candidates_for
from ..selector.precompile import prepare_compiling
from ..selector.progress import Progress
from ..selector.remote import import_meanwhile, prepare_measuring
from ..settings import Settings, use
from ..store.store import Store, open_store
from ..tuning.tune import tuned

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


def candidates_in_models(problem: Problem, device: DeviceInfo, settings: Settings, store: Store) -> Candidates:
    """Return the candidates for a product of a model. With an epilogue, only the best ones without it if these were measured."""
    cost_us = host_us(device, settings)
    found = candidates_for(problem, device, settings, host_us=cost_us)
    if problem.epilogue is None:
        return found
    alone = candidates_for(without_epilogue(problem), device, settings, host_us=cost_us).stored(store)
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
        store = open_store(settings)
        try:
            for fused in (False, True):
                wanted = [p for p in distinct if (p.epilogue is not None) == fused]
                candidates = [candidates_in_models(p, device, settings, store) for p in wanted]
                for _ in tuned(candidates, store, progress, limits=False):
                    pass
        finally:
            progress.close()
            forget_plans()
            import_meanwhile(device, INDUCTOR)
