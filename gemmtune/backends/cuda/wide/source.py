"""The text of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..mixed.source import MixedSource
from .configs import Shape

__all__ = ["KERNEL", "Source"]

KERNEL = "gemmtune_wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(MixedSource):
    """Weights are widened in registers of a warp group."""

    PACKAGE: ClassVar = __package__
    FILES: ClassVar = (
        "wide.cu.jinja", "device.cuh.jinja", "numbers.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja",
        "finish.cuh.jinja", "host.h.jinja",
    )  # fmt: skip

    shape: Shape

    @property
    def values(self) -> dict[str, object]:
        """What the templates are given."""
        shape, weights = self.shape, self.weights
        return self.asked | {
            "kernel": KERNEL,
            "name": f"i{weights.bits}_{shape.label(weights)}",
            "rows": shape.rows,
            "groups_n": shape.groups,
            "tiles": shape.tiles,
            "line": shape.line,
            "stages": shape.stages,
            "batch": shape.batch_of(weights),
            "resident": shape.resident,
            "room": shape.room_bytes,
            "scaled": weights.scale is not None and not weights.scale.group,
            "direct": self.epilogue is None and self.out_dtype != torch.float32,
        }
