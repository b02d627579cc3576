"""The text of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..dense import DenseSource
from ..source import flag
from .configs import Shape
from .launch import Launch

__all__ = ["KERNEL", "Source"]

KERNEL = "gemmtune_cluster"
PATIENCE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(DenseSource):
    """Beside sizes, strides and scalars, the division of K among clusters is an argument."""

    PACKAGE: ClassVar = __package__
    FILES: ClassVar = (
        "cluster.cu.jinja", "device.cuh.jinja", "steps.cuh.jinja", "exchange.cuh.jinja",
        "finish.cuh.jinja", "groups.cuh.jinja", "host.h.jinja",
    )  # fmt: skip
    LAUNCH: ClassVar = Launch

    shape: Shape
    patience: int = PATIENCE
    """How often a warp looks for the sums of other clusters before it leaves its work to the last of them."""

    @property
    def values(self) -> dict[str, object]:
        """What the templates are given."""
        shape = self.shape
        return self.asked | {
            "kernel": KERNEL,
            "name": str(shape),
            "rows": shape.rows,
            "cols": shape.cols,
            "depth": shape.depth,
            "stages": shape.stages,
            "blocks": shape.blocks,
            "spread_rows": shape.spread_rows,
            "spread_cols": shape.spread_cols,
            "resident": shape.resident,
            "at_once": shape.at_once,
            "p_by_k": flag(self.p_by_k),
            "p_transposed": int(not self.p_by_k),
            "patience": self.patience,
        }
