"""Variants, what one compiled kernel can be told at launch: tried for the fastest few kernels only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ..backends.table import TEMPLATES
from ..choice import Choice, Offers
from ..effort import EFFORT
from ..filters import FILTERS, filtered, uncapped
from ..settings import Settings
from .pick import right
from .result import Outcome

__all__ = ["known_variants", "untried_variants"]


def known_variants(choices: Iterable[Choice], wanted: Collection[str], settings: Settings) -> dict[str, Choice]:
    """The variants of ``choices``, and of variants found, whose content hash is ``wanted``; by content hash.

    As for everything that the store knows, regexes and the size threshold hold, caps do not.
    """
    found: dict[str, Choice] = {}
    asked = list(choices)
    while asked and len(found) < len(wanted):
        fresh = {v.content_hash: v for choice in asked for v in choice.launch_variants() if v.content_hash in wanted}
        asked = [v for digest, v in fresh.items() if digest not in found]
        found |= fresh
    passed = filtered(Offers(choices=tuple(found.values())), uncapped(settings), templates=TEMPLATES).choices
    return {choice.content_hash: choice for choice in passed}


def untried_variants(choices: Mapping[str, Choice], outcomes: Mapping[str, Outcome], settings: Settings) -> list[Choice]:
    """Variants of the fastest kernels that the settings let pass and that have no outcome, those of the fastest first.

    ``choices`` and ``outcomes`` are by content hash. The caps of the settings count the choices that were tried already.
    """
    ranked, effort = right(outcomes.values()), EFFORT[settings.search]
    fastest: dict[str, Choice] = {}
    for outcome in ranked:
        choice = choices[outcome.content_hash]
        near = (outcome.time_us or 0.0) <= effort.variant_near * (ranked[0].time_us or 0.0)
        if choice.compile_key is not None and near and len(fastest) < effort.variant_kernels:
            fastest.setdefault(choice.compile_key, choice)
    variants = {
        v.content_hash: v for choice in fastest.values() for v in choice.launch_variants() if v.content_hash not in outcomes
    }
    passed = filtered(Offers(choices=tuple(variants.values())), settings, templates=TEMPLATES).choices
    return _within_caps(passed, outcomes, settings)


def _within_caps(variants: Iterable[Choice], outcomes: Mapping[str, Outcome], settings: Settings) -> list[Choice]:
    tried = Counter(outcome.backend for outcome in outcomes.values())
    kept: list[Choice] = []
    for choice in variants:
        caps = [getattr(settings, row.cap) for row in FILTERS if row.covers(choice.backend)]
        if all(cap is None or tried[choice.backend] < cap for cap in caps):
            tried[choice.backend] += 1
            kept.append(choice)
    return kept
