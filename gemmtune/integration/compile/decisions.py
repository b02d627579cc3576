"""Policies that decide for each GEMM of a graph how it is rewritten."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ...device import detect
from .attention import Attention
from .attention_times import AttentionDecision
from .horizontal import HorizontalFusion
from .products import Product
from .report import Decision, Taken


class RewritePolicy(Protocol):
    """Decides for each GEMM of a graph."""

    def prepare(self, products: Iterable[Product], fusions: Iterable[HorizontalFusion]) -> None:
        """Measure what the decisions on this graph need."""

    def decide_attention(self, attention: Attention) -> AttentionDecision | None:
        """Return which config replaces attention of one query. None if the device has no kernels for it."""

    def decide(self, product: Product) -> Decision:
        """Return how one GEMM is rewritten."""

    def decide_horizontal(self, fusion: HorizontalFusion) -> Decision:
        """Return ``joined`` if the GEMMs become one. Otherwise ``decide`` is called for each of them."""

    def token(self) -> object:
        """Return a value that changes with the decisions and is equal across processes, or None if there is no such value."""


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Rewrites every GEMM in the same way, whatever it costs. Serves to compile variants of a graph for comparison."""

    taken: Taken
    only: Callable[[Product], bool] | None = None
    reason: str = "a variant for comparison"

    def prepare(self, products: Iterable[Product], fusions: Iterable[HorizontalFusion]) -> None:
        """Do nothing: a fixed decision needs no measurement."""

    def decide(self, product: Product) -> Decision:
        """Return ``taken``, but ``alone`` instead of ``fused`` if the GEMM has no epilogue."""
        if not self._takes(product):
            return Decision(taken="", reason=self.reason)
        taken: Taken = "fused" if self.taken == "fused" and product.fused is not None else "alone"
        return Decision(taken=taken, reason=self.reason)

    def decide_horizontal(self, fusion: HorizontalFusion) -> Decision:
        """Return ``joined`` if this policy rewrites each of the GEMMs."""
        taken: Taken = "joined" if all(map(self._takes, fusion.products)) else ""
        return Decision(taken=taken, reason=self.reason)

    def decide_attention(self, attention: Attention) -> AttentionDecision | None:
        """Return the first config, if this policy rewrites all GEMMs."""
        device = detect(attention.node.args[0].meta["val"].device)  # type: ignore[union-attr]
        config = attention.configs(device)[0] if self.taken and self.only is None else None
        return AttentionDecision(taken="alone" if config else "", reason=self.reason, config=config)

    def token(self) -> object:
        """Return the fixed decision, or None with ``only``: a function has no value that another process knows."""
        return self.taken if self.only is None else None

    def _takes(self, product: Product) -> bool:
        return bool(self.taken) and (self.only is None or self.only(product))
