"""Which of the legal choices are tried: determinism, size threshold, allow regex, deny regex and cap, in this order.

Pure: every filter takes offers and returns offers, with a refusal for each choice that it takes away.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from ..allowed import FILTERS, FilterSettings, why_not_allowed
from ..backends.table import BACKENDS, TEMPLATES
from ..choice import Choice, Offers, Refusal
from ..settings import ENVIRONMENT_PREFIX, Settings
from .mixed import by_mixed_mm_choice

__all__ = [
    "by_cap",
    "by_determinism",
    "by_regex",
    "by_size",
    "filtered",
    "nothing_left",
    "schedule_of",
    "spread",
    "tile_of",
    "uncapped",
    "without",
]

TILE_KEYS = ("tile", "mr", "nr", "kc")
SCHEDULE_KEYS = ("schedule", "scheduler", "cluster", "mode", "direct", "padded")
"""The entries of a choice's ``info`` that make its tile and its schedule, of whichever the backend has. To split K at all is a
schedule of its own too."""


def filtered(offers: Offers, settings: Settings, rows: Sequence[FilterSettings] = FILTERS) -> Offers:
    """The offers that pass the filters, in their order, with a refusal for every other one."""
    offers = by_determinism(by_mixed_mm_choice(offers, settings), settings)
    offers = _large_enough(offers, settings, rows)
    for row in rows:
        allow, deny = getattr(settings, row.allow), getattr(settings, row.deny)
        offers = by_regex(offers, allow, deny, names=(row.allow, row.deny), backends=row.backends or tuple(BACKENDS))
    for row in rows:
        for backend in _templates(row):
            offers = by_cap(offers, getattr(settings, row.cap), setting=row.cap, backend=backend)
    return offers


def uncapped(settings: Settings, rows: Sequence[FilterSettings] = FILTERS) -> Settings:
    """The settings without their caps."""
    none: dict[str, Any] = dict.fromkeys(row.cap for row in rows)
    return dataclasses.replace(settings, **none)


def by_determinism(offers: Offers, settings: Settings) -> Offers:
    """Without the choices that do not claim equal bits for equal inputs, unless the settings allow them."""
    variable = f"{ENVIRONMENT_PREFIX}DETERMINISTIC=0"
    why = f"equal inputs need not give equal bits: deterministic forbids it ({variable} allows it where torch does)"
    return offers if not settings.deterministic else without(offers, lambda choice: None if choice.claims.deterministic else why)


def by_size(offers: Offers, least: int, *, setting: str, backends: Collection[str]) -> Offers:
    """Without the choices of ``backends`` for products whose M·N·K (of one matrix of a batch) is below ``least``."""

    def reason(choice: Choice) -> str | None:
        problem = choice.problem
        size = problem.m * problem.n * problem.terms
        return f"M·N·K = {size} is below {setting} = {least}" if choice.backend in backends and size < least else None

    return without(offers, reason)


def by_regex(
    offers: Offers, allow: str | None, deny: str | None, *, names: tuple[str, str], backends: Collection[str] = tuple(BACKENDS)
) -> Offers:
    """The choices of ``backends`` in whose name ``allow`` is found and ``deny`` is not; empty or None filters nothing.

    ``names`` are the settings' names, for the reasons.
    """

    def reason(choice: Choice) -> str | None:
        return why_not_allowed(choice.name, allow, deny, names) if choice.backend in backends else None

    return without(offers, reason)


def by_cap(offers: Offers, cap: int | None, *, setting: str, backend: str) -> Offers:
    """At most ``cap`` choices of a backend (None: all), as ``spread`` takes them."""
    own = [choice for choice in offers.choices if choice.backend == backend]
    if cap is None or len(own) <= cap:
        return offers
    taken = {choice.name for choice in spread(own, cap)}

    def reason(choice: Choice) -> str | None:
        out = choice.backend == backend and choice.name not in taken
        return f"not among the {cap} of {len(own)} that {setting} leaves" if out else None

    return without(offers, reason)


def spread(choices: Sequence[Choice], cap: int) -> tuple[Choice, ...]:
    """``cap`` of the choices, spread over their tiles and schedules. Given and returned with the best-ranked first.

    One after the other is taken: of those whose pair of tile and schedule was taken least often, one whose tile and schedule are
    both new, or one of them; else one whose tile and schedule were taken least often; among equals the best-ranked. A larger cap
    therefore adds choices and drops none.
    """
    waiting: dict[tuple[Hashable, Hashable], deque[int]] = {}
    for rank, choice in enumerate(choices):
        waiting.setdefault((tile_of(choice), schedule_of(choice)), deque()).append(rank)
    pairs, tiles, schedules = Counter[Hashable](), Counter[Hashable](), Counter[Hashable]()

    def order(pair: tuple[Hashable, Hashable]) -> tuple[int, int, int, int]:
        tile, schedule = pair
        return (pairs[pair], (tile in tiles) + (schedule in schedules), tiles[tile] + schedules[schedule], waiting[pair][0])

    taken: list[int] = []
    while waiting and len(taken) < cap:
        first = min(waiting, key=order)
        taken.append(waiting[first].popleft())
        if not waiting[first]:
            del waiting[first]
        pairs[first] += 1
        tiles[first[0]] += 1
        schedules[first[1]] += 1
    return tuple(choices[rank] for rank in sorted(taken))


def tile_of(choice: Choice) -> Hashable:
    """What two choices with the same tile have in common."""
    return tuple(str(choice.info.get(key)) for key in TILE_KEYS)


def schedule_of(choice: Choice) -> Hashable:
    """What two choices with the same schedule have in common."""
    return (*(str(choice.info.get(key)) for key in SCHEDULE_KEYS), choice.info.get("splits", 1) > 1)


def nothing_left(offers: Offers, settings: Settings, rows: Sequence[FilterSettings] = FILTERS) -> list[str]:
    """A sentence for each regex that leaves none of the choices of its backends, naming the setting and how to change it."""
    offers = _large_enough(offers, settings, rows)
    texts = []
    for row in rows:
        offered = Offers(choices=[choice for choice in offers.choices if row.covers(choice.backend)])
        allow, deny, names = getattr(settings, row.allow), getattr(settings, row.deny), (row.allow, row.deny)
        allowed = by_regex(offered, allow, None, names=names)
        if offered.choices and not allowed.choices:
            what = f"{row.allow}: got {allow!r}, which is found in no choice's name, such as {offered.choices[0].name}"
            texts.append(f"{what}; change or unset it ({ENVIRONMENT_PREFIX}{row.allow.upper()})")
        elif allowed.choices and not by_regex(allowed, None, deny, names=names).choices:
            which = f"every choice that {row.allow} {allow!r} leaves" if allow else "every choice"
            what = f"{row.deny}: got {deny!r}, which is found in the name of {which}, such as {allowed.choices[0].name}"
            texts.append(f"{what}; change or unset it ({ENVIRONMENT_PREFIX}{row.deny.upper()})")
    return texts


def _large_enough(offers: Offers, settings: Settings, rows: Sequence[FilterSettings]) -> Offers:
    for row in rows:
        offers = by_size(offers, getattr(settings, row.min_size), setting=row.min_size, backends=_templates(row))
    return offers


def _templates(row: FilterSettings) -> list[str]:
    return [backend for backend in BACKENDS if backend in TEMPLATES and row.covers(backend)]


def without(offers: Offers, reason: Callable[[Choice], str | None]) -> Offers:
    """The offers without the choices for which there is a reason; those become refusals."""
    kept: list[Choice] = []
    refused: list[Refusal] = []
    for choice in offers.choices:
        why = reason(choice)
        if why is None:
            kept.append(choice)
        else:
            refused.append(Refusal(name=choice.name, reason=why))
    return Offers(choices=tuple(kept), refusals=(*offers.refusals, *refused)) if refused else offers
