"""How products of a model are measured: beside other kernels, without what only tables show, and fused ones among few kernels.

A product that follows itself may begin while the one before ends, which saves up to 4 µs. In a model other kernels are between, and
let it do so where Inductor makes them with its option ``triton.enable_pdl``.
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
"""What the measuring process needs to time what Inductor makes. Importing it takes seconds, which a model is traced meanwhile."""


def in_models(settings: Settings, device: DeviceInfo) -> Settings:
    """The settings with ``timing="spaced"``, on a GPU and in the place of ``graph``: unless Inductor's kernels overlap there."""
    if device.type == "cpu" or settings.timing != "graph" or inductor_overlaps(device):
        return settings
    return dataclasses.replace(settings, timing="spaced")


def inductor_overlaps(device: DeviceInfo) -> bool:
    """Whether what Inductor compiles now for the device lets the next kernel begin while it ends, and may begin so itself."""
    if not can_overlap(device.capability):
        return False
    from torch._inductor import config  # noqa: PLC0415 - seconds, of which products without a GPU need none

    return bool(config.triton.enable_pdl)


def prepare_tuning(device: DeviceInfo, settings: Settings) -> None:
    """Start the processes of a tuning, which need seconds for their imports, before it is known what there is to tune."""
    if settings.tune_in_subprocess:
        prepare_measuring(device, settings)
    if device.type != "cpu":
        prepare_compiling(settings)


def without_epilogue(problem: Problem) -> Problem:
    """The product alone, in the dtype that it has by itself."""
    dtype = problem.operation.result_dtype(problem.dtype, epilogue=False)
    return dataclasses.replace(problem, epilogue=None, out=dataclasses.replace(problem.out, dtype=dtype))


def candidates_in_models(problem: Problem, device: DeviceInfo, settings: Settings, store: Store) -> Candidates:
    """What is tried for a product of a model: with an epilogue, those that are good without it, where that is known."""
    cost_us = host_us(device, settings)
    found = candidates_for(problem, device, settings, host_us=cost_us)
    if problem.epilogue is None:
        return found
    alone = candidates_for(without_epilogue(problem), device, settings, host_us=cost_us).stored(store)
    return found.narrowed(alone)


def tune_products(problems: Iterable[Problem], device: DeviceInfo, settings: Settings, progress: Progress) -> None:
    """Tune products of a model on a device, those with an epilogue last. What the store knows is not measured again.

    Those of K = 1 are left to torch: there is nothing to add up, and Inductor takes them for pointwise operations.
    """
    distinct = [p for p in dict.fromkeys(problems) if p.device_type == device.type and p.k > 1]
    with use(settings):
        store = open_store(settings)
        try:
            for fused in (False, True):
                asked = [p for p in distinct if (p.epilogue is not None) == fused]
                candidates = [candidates_in_models(p, device, settings, store) for p in asked]
                for _ in tuned(candidates, store, progress, limits=False):
                    pass
        finally:
            progress.close()
            forget_plans()
            import_meanwhile(device, INDUCTOR)
