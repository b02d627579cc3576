"""The family's row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ..family import Family, float32_sums
from ..hopper import WGMMA
from ..mixed.config import told, variants
from ..mixed.weights import weights_of
from .configs import Config
from .legality import why_not, why_not_config
from .parameters import record
from .rank import CLUSTER_SIZES, candidates, estimate_us, why_not_likely
from .source import source

__all__ = ["WGMMA_FAMILY"]


def _variants(_problem: Problem, _device: DeviceInfo, config: Config) -> Iterator[Config]:
    """One block more or less divides K."""
    return variants(config, (size for size in CLUSTER_SIZES if abs(size - config.cluster_k) == 1))


def _label(problem: Problem, config: Config) -> str:
    return config.label(weights_of(problem))


def _claims(problem: Problem, config: Config) -> Claims:
    """Weights are rounded to a's dtype when zero points are subtracted, and when scales change along K."""
    weights = weights_of(problem)
    rounds = weights.zero is not None or bool(weights.along_k)
    return float32_sums(splits=config.cluster_k, weights=problem.dtype if rounds else None)


def _info(problem: Problem, config: Config) -> dict[str, Any]:
    shape = config.shape
    return told(config, tile=(shape.block_m, shape.block_n, shape.block_k(weights_of(problem))), splits=config.cluster_k)


WGMMA_FAMILY: Family[Config] = Family(
    name="wgmma",
    likely=1.25,
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
