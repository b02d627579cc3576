"""The family's row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ..family import Family, float32_sums
from ..hopper import WGMMA
from .configs import Config
from .legality import clusters_of, why_not, why_not_config
from .parameters import record
from .rank import candidates, cluster_counts, estimate_us, why_not_likely
from .source import source

__all__ = ["CLUSTER"]


def _variants(problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:
    """More or fewer clusters for a tile, and how it begins."""
    yield dataclasses.replace(config, pdl=not config.pdl, prefetch_stages=0)
    if config.pdl:
        yield dataclasses.replace(config, prefetch_stages=0 if config.prefetch_stages else config.shape.prefetch_stages)
    for count in cluster_counts(config.shape, clusters_of(problem, config), problem, device):
        if count != config.clusters_per_tile:
            yield dataclasses.replace(config, clusters_per_tile=count)


def _label(_problem: Problem, config: Config) -> str:
    return str(config)


def _claims(_problem: Problem, config: Config) -> Claims:
    return float32_sums(splits=config.parts)


def _info(_problem: Problem, config: Config) -> dict[str, Any]:
    shape = config.shape
    return {
        "tile": [shape.block_m, shape.block_n, shape.block_k],
        "stages": shape.stages,
        "warps": shape.threads // 32,
        "cluster": shape.cluster,
        "splits": config.parts,
        "swap_ab": config.swap_ab,
        "pdl": config.pdl,
        "prefetch_stages": config.prefetch_stages,
    }


CLUSTER: Family[Config] = Family(
    name="cluster",
    likely=1.2,
    why_not=why_not,
    why_not_likely=why_not_likely,
    why_not_config=why_not_config,
    candidates=candidates,
    estimate_us=estimate_us,
    launch_variants=_variants,
    label=_label,
    claims=_claims,
    info=_info,
    source=source,
    record=record,
    instruction=WGMMA,
)
