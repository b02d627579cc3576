"""The configs of a family that are legal for a problem, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from ...choice import Refusal

__all__ = ["legal_configs"]

C = TypeVar("C")


def legal_configs(name: str, configs: Iterable[C], why_not: Callable[[C], str | None]) -> tuple[list[C], tuple[Refusal, ...]]:
    """Those with which ``why_not`` finds nothing wrong, in their order; the others counted by reason, for the family ``name``."""
    legal: list[C] = []
    refused: Counter[str] = Counter()
    for config in configs:
        reason = why_not(config)
        if reason is None:
            legal.append(config)
        else:
            refused[reason] += 1
    return legal, tuple(Refusal(name=f"{name}:{n} configs", reason=reason, count=n) for reason, n in refused.most_common())
