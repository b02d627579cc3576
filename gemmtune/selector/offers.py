"""The offers of the enabled backends for a problem, and launch options of the fastest few kernels as variants."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..backends.around import BY_INDEX, densified, with_steps
from ..backends.table import BACKENDS, TEMPLATES, check_names, load
from ..choice import Choice, Offers, Refusal
from ..device import DeviceInfo
from ..effort import EFFORT
from ..filters import filtered, nothing_left, without
from ..numerics.block_sparse import dense_problem
from ..numerics.routed import grouped_problem
from ..problem import Problem
from ..settings import Settings, use
from .pick import right
from .result import Outcome


def enabled_backends(device: DeviceInfo, settings: Settings) -> tuple[str, ...]:
    """Return the backends that the settings name or enable, or the device's. Raises SettingsError for one not in the table."""
    named = settings.backends
    check_names(named or ())
    return tuple(
        name
        for name, row in BACKENDS.items()
        if (row.brought_by is not None and getattr(settings, row.brought_by))
        or (name in named if named is not None else load(name).serves_by_default(device))
    )


def libraries_of(device: DeviceInfo, settings: Settings) -> tuple[str, ...]:
    """Return the enabled backends that only call libraries and compile nothing."""
    return tuple(name for name in enabled_backends(device, settings) if not BACKENDS[name].compiles)


def offers_for(problem: Problem, device: DeviceInfo, settings: Settings, *, on_this_machine: bool = True) -> Offers:
    """Return every choice of the enabled backends that passes the filters, and every refusal with its reason.

    Warn if a regex leaves nothing. Without ``on_this_machine``, assume device, compilers and libraries to be present.
    """
    legal = legal_offers(problem, device, settings, on_this_machine=on_this_machine)
    _warn_if_nothing_is_left(legal, settings)
    return filtered(legal, settings, templates=TEMPLATES)


def _warn_if_nothing_is_left(legal: Offers, settings: Settings) -> None:
    for text in nothing_left(legal, settings, templates=TEMPLATES):
        warnings.warn(text, RuntimeWarning, stacklevel=1)  # attributed to this line, so it is shown once for all problems


def widest_offers_for(problem: Problem, device: DeviceInfo, settings: Settings, *, on_this_machine: bool = True) -> Offers:
    """Return what may run if the store knows it: the exhaustive search's offers, without a cap, past size threshold and regexes."""
    widest = dataclasses.replace(settings, max_profiling_configs=None, search="exhaustive")
    return filtered(legal_offers(problem, device, widest, on_this_machine=on_this_machine), widest, templates=TEMPLATES)


def legal_offers(problem: Problem, device: DeviceInfo, settings: Settings, *, on_this_machine: bool = True) -> Offers:
    """Return ``offers_for`` before the filters."""
    choices: list[Choice] = []
    refusals: list[Refusal] = []
    with use(settings):
        for name in enabled_backends(device, settings):
            backend = load(name)
            if on_this_machine and not (available := backend.available(device)).ok:
                refusals.append(Refusal(name=name, reason=available.detail))
                continue
            offers = backend.enumerate(problem, device, settings)
            if problem.op in BY_INDEX and name != "aten":
                offers = with_steps(problem, offers, backend.enumerate(grouped_problem(problem), device, settings))
            choices += offers.choices
            refusals += offers.refusals
            # torch itself offers the dense product. If each call makes the dense matrix, another product hardly matters.
            if problem.prepacked and problem.sparsity is not None and name != "aten":
                dense = backend.enumerate(dense_problem(problem), device, settings)
                choices += densified(problem, dense).choices[: EFFORT[settings.search].densified]
        legal = Offers(choices=tuple({c.content_hash: c for c in choices}.values()), refusals=tuple(refusals))
        return without(legal, lambda choice: choice.obstacle) if on_this_machine else legal


def named_choice(
    name: str, backend: str, problem: Problem, device: DeviceInfo, settings: Settings, *, on_this_machine: bool = True
) -> Choice | None:
    """Return the legal choice with this name that passes the settings, or None; also None if the backend has to enumerate it.

    Without ``on_this_machine``, assume device, compilers and libraries to be present.
    """
    found = load(backend)
    find = getattr(found, "named", None)
    if find is None or backend not in enabled_backends(device, settings):
        return None
    if on_this_machine and not found.available(device).ok:
        return None
    made = find(name, problem, device)
    usable = (made,) if made is not None and not (on_this_machine and made.obstacle) else ()
    return next(iter(_passed(usable, settings)), None)


def known_variants(choices: Iterable[Choice], wanted: Collection[str], settings: Settings) -> dict[str, Choice]:
    """Return, by hash, the variants of ``choices``, and of those, that are ``wanted`` and pass regexes and size threshold."""
    found: dict[str, Choice] = {}
    pending = list(choices)
    while pending and len(found) < len(wanted):
        fresh = {v.content_hash: v for choice in pending for v in choice.launch_variants() if v.content_hash in wanted}
        pending = [v for digest, v in fresh.items() if digest not in found]
        found |= fresh
    return {choice.content_hash: choice for choice in _passed(found.values(), settings)}


def _passed(choices: Iterable[Choice], settings: Settings, *, capped: bool = False) -> Sequence[Choice]:
    """Return the choices that pass the filters, however many unless they are ``capped``."""
    return filtered(Offers(choices=tuple(choices)), settings, templates=TEMPLATES, capped=capped).choices


def interleaved(choices: Sequence[Choice]) -> list[Choice]:
    """Return the first choice of each kind of kernel (template and swap), then the second ones, so that any budget covers all."""
    ranks: Counter[tuple[object, ...]] = Counter()
    placed: list[tuple[int, Choice]] = []
    for choice in choices:
        kind = (choice.backend, choice.info.get("template") or choice.name.partition("_")[0], bool(choice.info.get("swap_ab")))
        placed.append((ranks[kind], choice))
        ranks[kind] += 1
    return [choice for _, choice in sorted(placed, key=lambda x: x[0])]


def untried_variants(choices: Mapping[str, Choice], outcomes: Mapping[str, Outcome], settings: Settings) -> list[Choice]:
    """Return untried variants of the fastest kernels that pass the settings, the fastest's first. The cap counts tried ones too."""
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
    passed = _passed(variants.values(), settings, capped=True)
    tried = Counter(outcome.backend for outcome in outcomes.values())
    kept: list[Choice] = []
    for choice in passed:
        if settings.max_profiling_configs is None or tried[choice.backend] < settings.max_profiling_configs:
            tried[choice.backend] += 1
            kept.append(choice)
    return kept
