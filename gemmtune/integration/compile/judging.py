"""What is decided of a GEMM, and who decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from .products import Product

Taken = Literal["", "alone", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a GEMM: it is rewritten ``alone``, or ``fused`` with its tail, or left. The fields are ``Decision``'s."""

    taken: Taken
    reason: str
    times_us: tuple[tuple[str, float], ...] = ()


class Judge(Protocol):
    """Decides for each GEMM of a graph."""

    def prepare(self, products: Iterable[Product]) -> None:
        """Find out whatever the verdicts on a graph's GEMMs will need."""
        ...

    def verdict(self, product: Product) -> Verdict:
        """What becomes of it."""
        ...

    def token(self) -> object:
        """A value that changes whenever a verdict may, and that another process has too."""
        ...


@dataclass(frozen=True, slots=True)
class Always:
    """Every GEMM goes the same way, whatever it costs: for variants of a graph that are measured against each other."""

    taken: Taken
    only: Callable[[Product], bool] = lambda _: True

    def prepare(self, products: Iterable[Product]) -> None:
        """Nothing has to be known."""

    def verdict(self, product: Product) -> Verdict:
        """``fused`` is ``alone`` where there is no tail."""
        if not self.taken or not self.only(product):
            return Verdict(taken="", reason="a variant for comparison")
        taken: Taken = "fused" if self.taken == "fused" and product.fused is not None else "alone"
        return Verdict(taken=taken, reason="a variant for comparison")

    def token(self) -> object:
        """The way."""
        return self.taken
