"""What the enabled backends have for a problem."""

from __future__ import annotations

import dataclasses
import warnings

from ..backends.table import BACKENDS, TEMPLATES, check_names, load
from ..choice import Choice, Offers, Refusal
from ..device import DeviceInfo
from ..filters import filtered, nothing_left, uncapped, without
from ..problem import Problem
from ..settings import Settings, use

__all__ = ["enabled_backends", "legal_offers", "offers_for", "widest_offers_for"]


def enabled_backends(device: DeviceInfo, settings: Settings) -> tuple[str, ...]:
    """The backends that the settings name, else those that serve the device by default; in the order of the table.

    Raises:
        SettingsError: the settings name a backend that is not in the table.
    """
    if settings.backends is not None:
        check_names(settings.backends)
        return tuple(name for name in BACKENDS if name in settings.backends)
    return tuple(name for name in BACKENDS if load(name).serves_by_default(device))


def offers_for(problem: Problem, device: DeviceInfo, settings: Settings, *, on_this_machine: bool = True) -> Offers:
    """Every choice of every enabled backend that passes the filters, and what was refused with the reason.

    Warns when a regex of the settings leaves nothing. With ``on_this_machine`` false nothing is asked of the machine: what would be
    tried where the device, the compilers and the libraries are present.
    """
    legal = legal_offers(problem, device, settings, on_this_machine=on_this_machine)
    for text in nothing_left(legal, settings, templates=TEMPLATES):
        warnings.warn(text, RuntimeWarning, stacklevel=1)  # of this line, whoever asks: shown once for all problems
    return filtered(legal, settings, templates=TEMPLATES)


def widest_offers_for(problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    """The offers of the exhaustive search, without a cap: everything that may be picked when the store already knows it.

    Search and cap say how much is tried; size threshold and regexes say what may run, and hold here too.
    """
    widest = dataclasses.replace(uncapped(settings), search="exhaustive")
    return filtered(legal_offers(problem, device, widest), widest, templates=TEMPLATES)


def legal_offers(problem: Problem, device: DeviceInfo, settings: Settings, *, on_this_machine: bool = True) -> Offers:
    """``offers_for`` before the filters."""
    choices: list[Choice] = []
    refusals: list[Refusal] = []
    with use(settings):
        for name in enabled_backends(device, settings):
            backend = load(name)
            if on_this_machine and not (available := backend.available(device)).ok:
                refusals.append(Refusal(name=name, reason=available.detail))
                continue
            offers = backend.enumerate(problem, device, settings)
            choices += offers.choices
            refusals += offers.refusals
        legal = Offers(choices=tuple({c.content_hash: c for c in choices}.values()), refusals=tuple(refusals))
        return without(legal, lambda choice: choice.obstacle) if on_this_machine else legal
