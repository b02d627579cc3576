"""The family's row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ..family import Family, float32_sums
from ..hopper import MMA
from ..mixed.config import told, variants
from ..mixed.weights import weights_of
from .configs import Config
from .legality import why_not, why_not_config
from .parameters import record
from .rank import candidates, cluster_sizes, estimate_us
from .source import source

__all__ = ["SKINNY"]

NEAR_SIZES = 3
"""How many sizes of a cluster launch variants have, the likeliest."""


def _why_not_likely(_problem: Problem, _device: DeviceInfo, _search: str) -> None:
    """Every search tries it where it is legal."""


def _variants(problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:
    return variants(config, cluster_sizes(config.shape, problem, device)[:NEAR_SIZES])


def _label(problem: Problem, config: Config) -> str:
    return config.label(weights_of(problem))


def _splits(config: Config) -> int:
    return config.cluster_k * config.shape.warps_k


def _claims(problem: Problem, config: Config) -> Claims:
    """Weights are rounded to a's dtype when zero points are subtracted; scales multiply sums."""
    return float32_sums(splits=_splits(config), weights=problem.dtype if weights_of(problem).zero else None)


def _info(problem: Problem, config: Config) -> dict[str, Any]:
    shape = config.shape
    return told(config, tile=(shape.block_m, shape.block_n, weights_of(problem).block_k()), splits=_splits(config))


SKINNY: Family[Config] = Family(
    name="skinny",
    likely=1.35,
    why_not=why_not,
    why_not_likely=_why_not_likely,
    why_not_config=why_not_config,
    candidates=candidates,
    estimate_us=estimate_us,
    launch_variants=_variants,
    label=_label,
    claims=_claims,
    info=_info,
    source=source,
    record=record,
    instruction=MMA,
)
