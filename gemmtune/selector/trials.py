"""Order of trial: a tuning begins with the choices that shipped measurements favour, even those of another GPU or version."""

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..choice import Choice, Offers
from ..device import DeviceInfo
from ..problem import Problem
from ..settings import Settings
from .features import MEMORY_GBPS, is_ruled
from .offers import offers_for
from .pick import right
from .predictor import shipped_predictor
from .result import Outcome
from .shipped import shipped_for

log = logging.getLogger("gemmtune")

NEAR = 0.32
"""Distance to the least predicted time, in octaves, up to which a choice is favoured: 25%."""
LIKELIEST = 2
"""Number of kernels of each template that are tried, whatever was measured elsewhere."""

FAVOURED = "cuda:gemv"
"""Family that is favoured where the rule serves and nothing is predicted."""
PREDICTED = 4
"""Number of the fastest choices by prediction that a quick search tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Choices that are tried first, by name. The others are left out if a favoured one is the fastest of these.

    Replayed on 50 products of an H200 by the first fit, the first choices are 39% of all, and the time found is 0.03% longer on
    average, 1.1% at most. With errors of a factor 1.3 in each prediction they are 51% and 0.2% longer on average, 5% at most.
    """

    first: tuple[str, ...]
    favoured: frozenset[str]
    source: str
    """GPUs whose measurements favour them."""

    def suffice(self, outcomes: Iterable[Outcome]) -> bool:
        """Return True if the fastest of the first choices is a favoured one."""
        ranked = right(o for o in outcomes if o.name in self.first)
        return bool(ranked) and ranked[0].name in self.favoured


def trials_for(problem: Problem, device: DeviceInfo, settings: Settings, choices: Sequence[Choice]) -> Trials | None:
    """Return the order of trial of choices. None if no measurements are near the problem, or if the settings need all choices."""
    predictor, like = shipped_predictor(), measured_like(device)
    if predictor is None or like is None or settings.search == "exhaustive" or settings.batch_invariant:
        return None
    if is_ruled(problem):
        near = [choice.name for choice in choices if choice.name.startswith(FAVOURED)]
    else:
        times = predictor.times(problem, like, choices)
        ranked = sorted(times, key=lambda name: float(times[name].mean()))
        near = [name for name in ranked if times[name].mean() <= times[ranked[0]].mean() + NEAR] if len(ranked) > 1 else []
    if not near:
        return None
    first = tuple(dict.fromkeys((*near, *likeliest(choices))))
    return Trials(first=first, favoured=frozenset(near), source=" and ".join(predictor.devices))


def tried_offers(problem: Problem, device: DeviceInfo, settings: Settings, *, on_this_machine: bool = True) -> Offers:
    """Return the offers of a search. A quick one takes the likely fastest of a default one, if measurements say which these are.

    Replayed on 253 products of an H200, with the weights of a fifth left out of the fit at a time, 95% of the quick searches end
    within 4.0% of the best stored time; with the offers of each backend, within 10.8%.
    """
    predictor, like = shipped_predictor(), measured_like(device) if settings.search == "quick" else None
    if predictor is not None and like is not None and predictor.knows(problem, like) and not settings.batch_invariant:
        default = dataclasses.replace(settings, search="default")
        offers = offers_for(problem, device, default, on_this_machine=on_this_machine)
        times = predictor.times(problem, like, offers.choices)
        if len(times) > 1:
            fastest = sorted(times, key=lambda name: float(times[name].mean()))[:PREDICTED]
            kept = {*fastest, *likeliest(offers.choices, 1)}
            return dataclasses.replace(offers, choices=tuple(c for c in offers.choices if c.name in kept))
    return offers_for(problem, device, settings, on_this_machine=on_this_machine)


def devices_like(device: DeviceInfo, settings: Settings) -> tuple[DeviceInfo, ...]:
    """Return the devices whose quick searches differ and that a preset stands for: the measured GPUs, or the device itself."""
    predictor = shipped_predictor()
    if settings.search != "quick" or predictor is None or device.name in predictor.devices or device.arch not in predictor.archs:
        return (device,)
    return tuple(dataclasses.replace(device, name=name) for name in predictor.devices)


def likeliest(choices: Iterable[Choice], most: int = LIKELIEST) -> list[str]:
    """Return the names of the choices that compile nothing, and of each template's first ``most``, which its ranking prefers."""
    counts, found = Counter[str](), list[str]()
    for choice in choices:
        template = choice.name.partition("_")[0]
        counts[template] += 1
        if choice.compile_key is None or counts[template] <= most:
            found.append(choice.name)
    return found


@functools.cache
def measured_like(device: DeviceInfo) -> DeviceInfo | None:
    """Return the device, with the name of a measured GPU if nothing is known of its own. None for other architectures.

    Another architecture has other kernels. How the device differs from those that were measured is logged once.
    """
    predictor = shipped_predictor()
    if predictor is None or device.arch not in predictor.archs or not device.l2_bytes:
        return None
    if device.name in predictor.devices:
        shipped_for(device)  # logs other versions
        return device
    measured = " and ".join(predictor.devices)
    log.info("gemmtune ships no measurements of %s: tunings begin with the choices that are fast on %s", device.name, measured)
    return device if device.name in MEMORY_GBPS else dataclasses.replace(device, name=predictor.devices[0])
