"""Gradient-boosted trees as arrays, evaluated with numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Sum of complete binary trees of one depth per model. ``row[feature] > threshold`` goes right, ``value`` has the leaves."""

    feature: NDArray[np.int8]  # (members, trees, 2^depth - 1)
    threshold: NDArray[np.float32]  # (members, trees, 2^depth - 1)
    value: NDArray[np.float32]  # (members, trees, 2^depth)
    start: NDArray[np.float32]  # (members,)

    def __post_init__(self) -> None:
        members, trees, nodes = self.feature.shape if self.feature.ndim == 3 else (0, 0, 0)
        leaves = (members, trees, nodes + 1)
        if not members or nodes & (nodes + 1) or self.threshold.shape != self.feature.shape:
            raise ValueError(f"forest: got nodes {self.feature.shape} and {self.threshold.shape}, expected complete trees")
        if self.value.shape != leaves or self.start.shape != (members,):
            raise ValueError(f"forest: got leaves {self.value.shape} and {self.start.shape}, expected {leaves} and ({members},)")

    @property
    def columns(self) -> int:
        """Number of features that the rows must have at least."""
        return int(self.feature.max()) + 1

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return each member's sum for each row: [members, rows]."""
        members, trees, nodes = self.feature.shape
        feature, threshold = self.feature.reshape(-1), self.threshold.reshape(-1)
        count, width = rows.shape
        flat, row = np.ascontiguousarray(rows).reshape(-1), (np.arange(count) * width)[:, None]
        root = (np.arange(members * trees) * nodes)[None, :]
        place = np.zeros((count, members * trees), dtype=np.int64)
        for _ in range((nodes + 1).bit_length() - 1):
            node = root + place
            place = 2 * place + 1 + (flat[row + feature[node]] > threshold[node])
        leaf = self.value.reshape(-1)[np.arange(members * trees)[None, :] * (nodes + 1) + place - nodes]
        sums: NDArray[np.float32] = leaf.reshape(count, members, trees).sum(axis=2)
        return (sums + self.start).T
