"""What is decided of a GEMM, and who decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from .joins import Join
from .products import Product

Taken = Literal["", "alone", "fused", "joined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a GEMM: it is rewritten ``alone``, ``fused`` with its tail or ``joined`` with others, or left.

    The fields are ``Decision``'s.
    """

    taken: Taken
    reason: str
    times_us: tuple[tuple[str, float], ...] = ()


class Judge(Protocol):
    """Decides for each GEMM of a graph."""

    def prepare(self, products: Iterable[Product], joins: Iterable[Join]) -> None:
        """Find out whatever the verdicts on a graph's GEMMs will need."""
        ...

    def verdict(self, product: Product) -> Verdict:
        """What becomes of it."""
        ...

    def joined(self, join: Join) -> Verdict:
        """Whether GEMMs become one; where they do not, each is asked for by itself."""
        ...

    def token(self) -> object:
        """Return a value that changes whenever a verdict may, and that another process has too; None where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Always:
    """Every GEMM goes the same way, whatever it costs: for variants of a graph that are measured against each other."""

    taken: Taken
    only: Callable[[Product], bool] | None = None

    def prepare(self, products: Iterable[Product], joins: Iterable[Join]) -> None:
        """Nothing has to be known."""

    def verdict(self, product: Product) -> Verdict:
        """``fused`` is ``alone`` where there is no tail."""
        if not self._takes(product):
            return Verdict(taken="", reason="a variant for comparison")
        taken: Taken = "fused" if self.taken == "fused" and product.fused is not None else "alone"
        return Verdict(taken=taken, reason="a variant for comparison")

    def joined(self, join: Join) -> Verdict:
        """All that can be are joined, where any GEMM is rewritten."""
        taken: Taken = "joined" if all(map(self._takes, join.products)) else ""
        return Verdict(taken=taken, reason="a variant for comparison")

    def token(self) -> object:
        """Return the way. A function has no value that another process knows."""
        return self.taken if self.only is None else None

    def _takes(self, product: Product) -> bool:
        return bool(self.taken) and (self.only is None or self.only(product))
