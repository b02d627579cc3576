"""Filters of legal choices: determinism, size threshold, allow regex, deny regex and cap, in this order.

Every filter takes offers and returns offers, with a refusal for each choice that it removes. A backend that ranks many operations
before it makes choices calls ``why_not_named`` first.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from .choice import Choice, Offers, Refusal
from .errors import SettingsError
from .regex import compiled
from .settings import ENVIRONMENT_PREFIX, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Regexes:
    """Names of the settings whose regular expressions filter the choices of ``backend`` (None: of all)."""

    allow: str
    deny: str
    backend: str | None = None

    def covers(self, backend: str) -> bool:
        """Return True if the row applies to the choices of that backend."""
        return self.backend in (None, backend)


REGEXES: tuple[Regexes, ...] = (
    Regexes(allow="choice_allowlist_regex", deny="choice_denylist_regex"),
    Regexes(allow="cutlass_op_allowlist_regex", deny="cutlass_op_denylist_regex", backend="cutlass"),
)
"""Pairs of regexes. A choice has to pass every pair of its backend."""


HEURISTIC = "heuristic"
"""Entry of a choice's ``info`` that marks the config that its backend recommends for the shape without measuring."""


TILE_KEYS = ("tile", "mr", "nr", "kc")
SCHEDULE_KEYS = ("template", "schedule", "scheduler", "cluster", "mode", "direct", "padded")
"""Entries of a choice's ``info`` that identify its tile and its schedule, for those that the backend has.

A choice that splits K has a different schedule from one that does not.
"""


def filtered(offers: Offers, settings: Settings, *, templates: Collection[str], capped: bool = True) -> Offers:
    """Return the offers that pass the filters, in order, with a refusal for every other one.

    ``templates`` are the backends whose kernels are made from templates, in the order of their table. Not ``capped``, any number
    passes.
    """
    offers = by_determinism(by_mixed_mm_choice(offers, settings), settings)
    offers = offers if settings.absent_blocks == "any" else without(offers, why_not_skipping)
    offers = by_size(offers, settings.template_min_gemm_size, templates)
    offers = without(offers, lambda choice: why_not_named(choice.name, choice.backend, settings))
    for backend in templates if capped else ():
        offers = by_cap(offers, settings.max_profiling_configs, backend)
    return offers


def nothing_left(offers: Offers, settings: Settings, *, templates: Collection[str]) -> list[str]:
    """Return a sentence for each regex that excludes all choices of its backends, with the setting and how to change it."""
    offers = by_size(offers, settings.template_min_gemm_size, templates)
    texts = []
    for row in REGEXES:
        offered = [choice for choice in offers.choices if row.covers(choice.backend)]
        allow, deny = getattr(settings, row.allow), getattr(settings, row.deny)
        allowed = [choice for choice in offered if not allow or _found(row.allow, allow, choice.name)]
        if offered and not allowed:
            what = f"{row.allow}: got {allow!r}, which matches no choice's name, such as {offered[0].name}"
            texts.append(f"{what}; change or unset it ({ENVIRONMENT_PREFIX}{row.allow.upper()})")
        elif deny and allowed and all(_found(row.deny, deny, choice.name) for choice in allowed):
            which = f"every choice that {row.allow} {allow!r} allows" if allow else "every choice"
            what = f"{row.deny}: got {deny!r}, which matches the name of {which}, such as {allowed[0].name}"
            texts.append(f"{what}; change or unset it ({ENVIRONMENT_PREFIX}{row.deny.upper()})")
    return texts


def by_determinism(offers: Offers, settings: Settings) -> Offers:
    """Remove the choices that do not claim equal bits for equal inputs, unless the settings allow them."""
    if not settings.deterministic:
        return offers
    allowing = f"{ENVIRONMENT_PREFIX}DETERMINISTIC=0"
    return without(offers, lambda choice: None if choice.claims.deterministic else choice.why_unordered(allowing))


def why_not_skipping(choice: Choice) -> str | None:
    """Return why a choice may not leave out absent blocks, or None. Integers have no NaN or infinity that could show."""
    problem = choice.problem
    if problem.sparsity is None or problem.integers or choice.claims.skips_absent:
        return None
    return "NaN and infinity may show at absent blocks: absent_blocks is 'skipped'"


def by_size(offers: Offers, least: int, backends: Collection[str]) -> Offers:
    """Remove the choices of ``backends`` for products whose M·N·K (of one matrix of a batch) is below ``least``."""

    def reason(choice: Choice) -> str | None:
        problem = choice.problem
        size = problem.m * problem.n * problem.terms
        return f"M·N·K = {size} is below template_min_gemm_size = {least}" if choice.backend in backends and size < least else None

    return without(offers, reason)


def by_mixed_mm_choice(offers: Offers, settings: Settings) -> Offers:
    """Keep the mixed_mm choices of the backend that the setting names or ``heuristic`` recommends, or else torch's operation."""
    wanted = settings.mixed_mm_choice
    if wanted == "default" or not offers.choices or not offers.choices[0].problem.widens_b:
        return offers
    if wanted == HEURISTIC:
        kept = [c for c in offers.choices if c.backend == "triton" and c.info.get(HEURISTIC)][:1]
    else:
        kept = [c for c in offers.choices if c.backend == wanted]
    kept = kept or [c for c in offers.choices if c.baseline]
    reason = f"mixed_mm_choice is {wanted!r}"
    refused = (Refusal(name=c.name, reason=reason) for c in offers.choices if c not in kept)
    return Offers(choices=tuple(kept), refusals=(*offers.refusals, *refused))


def why_not_named(name: str, backend: str, settings: Settings) -> str | None:
    """Return why the regexes of the settings exclude the backend's choice of this name, or None. Empty ones exclude nothing."""
    for row in filter(lambda row: row.covers(backend), REGEXES):
        allow, deny = getattr(settings, row.allow), getattr(settings, row.deny)
        if allow and not _found(row.allow, allow, name):
            return f"{row.allow} {allow!r} does not match the name"
        if deny and _found(row.deny, deny, name):
            return f"{row.deny} {deny!r} matches the name"
    return None


def _found(setting: str, pattern: str, name: str) -> bool:
    """Return True if the regex of a setting matches in a name. Raises SettingsError if it takes too long."""
    try:
        return compiled(pattern).found(name)
    except ValueError as error:
        raise SettingsError(f"{setting}: got {pattern!r}, expected a regular expression that matches quickly; {error}") from error


def by_cap(offers: Offers, cap: int | None, backend: str) -> Offers:
    """Keep at most ``cap`` choices of a backend (None: all), selected by ``diverse``."""
    own = [choice for choice in offers.choices if choice.backend == backend]
    if cap is None or len(own) <= cap:
        return offers
    taken = {choice.name for choice in diverse(own, cap)}

    def reason(choice: Choice) -> str | None:
        out = choice.backend == backend and choice.name not in taken
        return f"not among the {cap} of {len(own)} that max_profiling_configs allows" if out else None

    return without(offers, reason)


def diverse(choices: Sequence[Choice], cap: int) -> tuple[Choice, ...]:
    """Return ``cap`` of the choices with diverse tiles and schedules. Arguments and result are ordered from best to worst rank.

    Each step takes a choice whose pair of tile and schedule was taken least often. Among these it prefers a tile and a schedule
    that are both new, then one of them new. Next it prefers a tile and a schedule taken least often, and finally the best rank. A
    larger cap therefore adds choices and drops none.
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
    """Return the tile of a choice as a comparable value."""
    return tuple(str(choice.info.get(key)) for key in TILE_KEYS)


def schedule_of(choice: Choice) -> Hashable:
    """Return the schedule of a choice as a comparable value."""
    return (*(str(choice.info.get(key)) for key in SCHEDULE_KEYS), choice.info.get("splits", 1) > 1)


def without(offers: Offers, reason: Callable[[Choice], str | None]) -> Offers:
    """Remove the choices for which ``reason`` returns a reason, and add them as refusals."""
    kept: list[Choice] = []
    refused: list[Refusal] = []
    for choice in offers.choices:
        why = reason(choice)
        if why is None:
            kept.append(choice)
        else:
            refused.append(Refusal(name=choice.name, reason=why))
    return Offers(choices=tuple(kept), refusals=(*offers.refusals, *refused)) if refused else offers
