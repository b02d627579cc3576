"""The text of the kernel, and of the one that copies a second unaligned operand before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..dense import DenseSource
from ..source import flag
from .configs import Shape
from .launch import Launch

__all__ = ["KERNEL", "PAD", "Source"]

KERNEL = "gemmtune_unaligned"
PAD = "gemmtune_unaligned_pad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(DenseSource):
    """Beside sizes, strides and scalars, how far lines are from aligned addresses is an argument. Lines of p are shifted."""

    PACKAGE: ClassVar = __package__
    FILES: ClassVar = (
        "unaligned.cu.jinja", "device.cuh.jinja", "copies.cuh.jinja", "sums.cuh.jinja", "store.cuh.jinja", "pad.cuh.jinja",
        "host.h.jinja",
    )  # fmt: skip
    LAUNCH: ClassVar = Launch

    shape: Shape
    turned: bool
    """Columns of the result, as the kernel sees it, are contiguous."""

    @property
    def values(self) -> dict[str, object]:
        """What the templates are given."""
        shape = self.shape
        return self.asked | {
            "kernel": KERNEL,
            "pad_kernel": PAD,
            "name": str(shape),
            "rows": shape.rows,
            "cols": shape.cols,
            "stages": shape.stages(p_by_k=self.p_by_k),
            "threads": shape.threads,
            "cluster": shape.cluster,
            "shifts_registers": flag(shape.shifts_registers),
            "p_by_k": flag(self.p_by_k),
            "turned": flag(self.turned),
        }
