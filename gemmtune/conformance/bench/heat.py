"""Where a wrong result is wrong, as a grid of cells that a person can look at."""

from __future__ import annotations

import math

import torch

from .outcome import HeatMap

__all__ = ["heat_map"]

MOST_CELLS = 64
"""Along each dimension."""


def heat_map(got: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor, batch: int) -> HeatMap:
    """The largest |got − expected| / tolerance in each cell of matrix ``batch``, all three float64 [B, M, N].

    An exact expectation (tolerance 0) is measured in units of float32 roundoff of the value, so that any difference shows.
    """
    x, y, t = got[batch], expected[batch], tolerance[batch]
    unit = torch.where(t > 0, t, 2.0**-24 * y.abs().clamp_min(2.0**-100))
    ratio = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs() / unit).nan_to_num(nan=math.inf)
    rows, cols = ratio.shape
    steps = (max(1, math.ceil(rows / MOST_CELLS)), max(1, math.ceil(cols / MOST_CELLS)))
    cells = torch.nn.functional.max_pool2d(ratio[None, None], steps, steps, ceil_mode=True)[0, 0]
    return HeatMap(batch=batch, rows=rows, cols=cols, cells=tuple(tuple(row) for row in cells.tolist()))
