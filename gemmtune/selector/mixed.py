"""What the setting ``mixed_mm_choice`` leaves of the choices for mixed_mm."""

from __future__ import annotations

from ..choice import Choice, Offers, Refusal
from ..settings import Settings

__all__ = ["HEURISTIC", "by_mixed_mm_choice"]

HEURISTIC = "heuristic"
"""The entry of a choice's ``info`` that is true for the config that its backend recommends for the shape, without measuring."""


def by_mixed_mm_choice(offers: Offers, settings: Settings) -> Offers:
    """The choices of the backend that the setting names, or for ``heuristic`` the one that its backend recommends; where there are
    none, torch's own operation. Other operations are left as they are."""
    wanted = settings.mixed_mm_choice
    if wanted == "default" or not offers.choices or offers.choices[0].problem.op != "mixed_mm":
        return offers
    kept = [c for c in offers.choices if _is_wanted(c, wanted)]
    kept = kept[:1] if wanted == HEURISTIC else kept
    kept = kept or [c for c in offers.choices if c.baseline]
    reason = f"mixed_mm_choice is {wanted!r}"
    refused = (Refusal(name=c.name, reason=reason) for c in offers.choices if c not in kept)
    return Offers(choices=tuple(kept), refusals=(*offers.refusals, *refused))


def _is_wanted(choice: Choice, wanted: str) -> bool:
    if wanted == HEURISTIC:
        return choice.backend == "triton" and bool(choice.info.get(HEURISTIC))
    return choice.backend == wanted
