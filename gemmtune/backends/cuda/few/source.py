"""The text of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..mixed.source import MixedSource
from .configs import Shape

__all__ = ["KERNEL", "Source"]

KERNEL = "gemmtune_few"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(MixedSource):
    """Weights are widened in registers of a warp."""

    PACKAGE: ClassVar = __package__
    FILES: ClassVar = (
        "few.cu.jinja", "device.cuh.jinja", "numbers.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja",
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
            "eights": shape.eights,
            "cols": shape.cols,
            "stages": shape.stages,
            "warps_n": shape.warps_n,
            "warps_k": shape.warps_k,
            "resident": shape.resident(weights),
        }
