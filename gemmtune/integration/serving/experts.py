"""Layers of experts: rows sorted by expert, two grouped products by our tables, and the weighted sum of each token's rows.

An engine routes: it gives the experts of each token, and their weights. M of both tables counts the rows of all experts, which are
the experts of a token for each token of a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...operators import library as library  # defines torch.ops.gemmtune
from ...problem.grouped_compositions import within_groups
from ..experts import by_expert
from .tables import INVARIANT, Engine, invariant, unserved_unmeasured

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a layer of experts in this process."""

    experts: int
    hidden: int
    inner: int
    """Columns of an activation's result."""
    halves: int
    """2 if an activation multiplies two halves of the columns, else 1."""
    copies: int
    """Experts of a token."""

    @property
    def weights(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """[N, K] of an expert's first and last weight."""
        return (self.halves * self.inner, self.hidden), (self.hidden, self.inner)


def why_not(op: str, sizes: Sizes, words: Mapping[str, Any], engine: Engine) -> str:
    """Return the reason why no tables serve a layer, or an empty text if both products have one."""
    if invariant(engine):
        return INVARIANT
    given = {**words, "groups": sizes.experts}
    reasons = [unserved_unmeasured(op, size, given, engine, copies=sizes.copies) for size in sizes.weights]
    return next(filter(None, reasons), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Rows of experts, in the order of the experts."""

    tokens: Tensor
    """The token of each row [M]."""
    experts: Tensor
    """The expert of each row [M]."""
    offs: Tensor
    """The end of each expert's rows [G]."""

    def biased(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """Return a product plus the bias [G, N] of each row's expert."""
        return product if bias is None else product + bias[self.experts.clamp(max=bias.shape[0] - 1)]


def summed(
    ids: Tensor,  # (T, C)
    weights: Tensor | None,  # (T, C)
    count: int,
    layer: Callable[[Routed], Tensor],
    *,
    all_here: bool,
) -> Tensor:
    """Return Σ_c weights[t, c] · the result of expert ids[t, c] for token t, added up in float32.

    Args:
        ids: numbers of experts. Those from ``count`` on add nothing.
        weights: None for ones.
        layer: returns the row of each expert's result.
        all_here: True if all numbers are below ``count``.
    """
    experts, slots, offs = by_expert(ids, count)
    rows = layer(Routed(tokens=slots // ids.shape[1], experts=experts, offs=offs))
    if not all_here:
        rows = within_groups(rows, offs)
    placed = torch.empty_like(rows).index_copy(0, slots, rows).view(*ids.shape, rows.shape[1])
    weighted = placed.float() if weights is None else placed * weights.float().unsqueeze(-1)
    return weighted.sum(1).to(rows.dtype)


def dense_layer(
    x: Tensor,  # (T, K)
    first: Tensor,  # (G, N, K)
    last: Tensor,  # (G, K, I)
    activate: Callable[[Tensor], Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Callable[[Routed], Tensor]:
    """Return the ``layer`` of ``summed`` for experts that are not quantized."""

    def layer(routed: Routed) -> Tensor:
        grouped, offs = torch.ops.gemmtune.grouped_mm, routed.offs
        h = routed.biased(grouped(x.index_select(0, routed.tokens), first.mT, offs, may_tune=False), biases[0])
        return routed.biased(grouped(activate(h), last.mT, offs, may_tune=False), biases[1])

    return layer
