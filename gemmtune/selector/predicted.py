"""Choices by prediction: gains over torch at some Ms of each class, and the few kernels that serve all classes of a model."""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ..backends.table import TEMPLATES
from ..choice import Choice, Offers
from ..device import DeviceInfo
from ..filters import filtered
from ..problem import Problem
from ..settings import Settings
from .features import is_ruled, kernel_of, kind_of
from .offers import enabled_backends, legal_offers, named_choice
from .predictor import Predictor
from .range_work import Work
from .shipped import Shipped

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
"""The last M of each interval that has one choice. The sizes of tiles are among them."""
MOST_KERNELS = 16
"""Kernels that the classes of a model share: as many compile at the same time on a usual machine."""
LEAST_GAIN = 0.01
"""Least gain of one more kernel, in octaves summed over the intervals of a class, on average of the classes."""
FEW_ROWS, CLEARLY = 64, 1.1
"""Rows up to which only measured kernels count, and the ratio of estimated times from which an unmeasured kernel is preferred.

On an H200 such a kernel takes 13 and 27% less time than the likeliest measured one for two int4 GEMMs (256 x 6144 x 4096 and
512 x 3072 x 3072), and 2% more for a third (1024 x 3072 x 2048).
"""
LISTED = "cuda"
"""Backend whose enumeration takes milliseconds, and lists only likely choices."""
OVERLAP = re.compile(r"_pdl\d*")
"""Part of a choice's name that says how early its kernel begins (programmatic dependent launch)."""
INTERLEAVED = "_interleaved"
"""End of the name of a launch whose blocks take the steps along K in turns. For the predictor it is as fast as the plain one.

On an H200 it takes 1.0% less time in the geometric mean of 434 pairs of int4 and int8 GEMMs, and less in 85% of them.
"""
Gains = Mapping[int, Mapping[str, float]]
"""Likely gain over torch in octaves, by M and name of the choice. Choices without a gain are left out."""


def likely_gains(work: Work, predictor: Predictor | None, shipped: Shipped | None) -> Gains:
    """Return the gains, shipped where that M was measured, of a class's choices and of neighbouring Ms', recorded in ``work``.

    Shipped are the fastest choices of an M. Classes share few kernels, so predictions for the others stand behind them.
    """
    found: dict[int, dict[str, float]] = {}
    members = [m for m in ROWS if work.rows_class.has(m)]
    problems = {m: work.rows_class.at(m) for m in members}
    listed = {m: known_choices(work, problem, predictor) if predictor is not None else {} for m, problem in problems.items()}
    for place, (m, problem) in enumerate(problems.items()):
        baseline, most = baseline_of(work, problem), math.inf
        gains = shipped_gains(work, problem, shipped) if shipped is not None and baseline is not None else None
        if gains is not None:
            found[m] = {work.take(m, choice): gain for choice, gain in gains.items() if gain > 0}
            most = min(gains.values(), default=0.0)
        if predictor is not None and baseline is not None and most > 0:
            near = members[max(place - 1, 0) : place + 2]
            homes = {name: home for home in (*near, m) for name in listed[home]}
            moved = {name: listed[home][name].at(problem, work.device) for name, home in homes.items()}
            choices = [choice for choice in moved.values() if isinstance(choice, Choice)]
            likely = predictor.gains(problem, work.device, choices, baseline)
            for choice, gain in zip(choices, likely, strict=True):
                if gain > 0:
                    home = homes[choice.name]
                    found.setdefault(m, {}).setdefault(work.take(home, listed[home][choice.name]), min(float(gain), most))
            if np.isfinite(likely).any():
                found.setdefault(m, {})
                for choice, gain in unmeasured_gains(work, problem, predictor, found[m]).items():
                    found[m][work.take(m, choice)] = min(gain, most)
    return found


def shipped_gains(work: Work, problem: Problem, shipped: Shipped) -> dict[Choice, float] | None:
    """Return the measured gains of choices that are the same kernels here. None if none was measured."""
    times = shipped.at(problem)
    torch_us = next((x.time_us for x in times if x.baseline), None)
    if torch_us is None:
        return None
    found: dict[Choice, float] = {}
    for x in times:
        choice = None if x.baseline else named_choice(x.name, x.name.partition(":")[0], problem, work.device, work.settings)
        if choice is not None and choice.content_hash.startswith(x.content_hash):
            found[choice] = math.log2(torch_us / x.time_us)
    return found if found or all(x.baseline for x in times) else None


def known_choices(work: Work, problem: Problem, predictor: Predictor) -> dict[str, Choice]:
    """Return the choices for a problem that were measured near it: those that CUDA lists quickly, and the predictor's by name.

    Of CUDA's the predictor names other launches of listed kernels. Finding them by name alone takes 5 ms each. Listed ones begin
    after the kernel before them.
    """
    portfolio = predictor.portfolios.get(kind_of(problem))
    if portfolio is None or is_ruled(problem) or not predictor.knows(problem, work.device):
        return {}
    names = {name: name.partition(":")[0] for name in portfolio.names if portfolio.supports(name, problem)}
    found = [named_choice(x, backend, problem, work.device, work.settings) for x, backend in names.items() if backend != LISTED]
    near = any(portfolio.supports(kernel, problem) for kernel in portfolio.measured if kernel.startswith(LISTED))
    listed = [without_overlap(c, work.settings) for c in offered_by(LISTED, work, problem)] if near else []
    kernels = {kernel_of(name) for name, backend in names.items() if backend == LISTED}
    varied = [v for c in listed if kernel_of(c.name) in kernels for v in c.launch_variants() if v.name in names]
    passed = filtered(Offers(choices=tuple(varied)), work.settings, templates=TEMPLATES, capped=False).choices
    return {c.name: c for c in (*found, *listed, *passed) if c is not None and portfolio.supports(c.name, problem)}


def unmeasured_gains(work: Work, problem: Problem, predictor: Predictor, gains: Mapping[str, float]) -> dict[Choice, float]:
    """Return the gains of kernels that were not measured near, such as new ones, if their estimates are clearly the least.

    The gain of the likeliest kernel of the same backend counts, and the ratio of both estimates. Only estimates for weights of few
    bits were compared with times.
    """
    likeliest = max((name for name in gains if name.startswith(LISTED)), key=gains.__getitem__, default=None)
    many = problem.widens_b and problem.m > FEW_ROWS
    at = work.choices[likeliest].at(problem, work.device) if likeliest is not None and many else None
    if likeliest is None or not isinstance(at, Choice) or at.estimate_us is None:
        return {}
    ours, supports = at.estimate_us, predictor.portfolios[kind_of(problem)].supports
    others = ((c, c.estimate_us) for c in offered_by(LISTED, work, problem) if not supports(c.name, problem))
    return {c: gains[likeliest] + math.log2(ours / us) for c, us in others if us is not None and us * CLEARLY < ours}


def baseline_of(work: Work, problem: Problem) -> Choice | None:
    """Return torch's own operation. None if the settings exclude it."""
    return next((c for c in offered_by("aten", work, problem) if c.baseline), None)


def offered_by(backend: str, work: Work, problem: Problem) -> Sequence[Choice]:
    """Return the choices of one backend that pass the settings. Empty if it is not enabled. A regex without matches is no fault."""
    return _offered(backend, problem, work.device, work.settings)


@functools.lru_cache(maxsize=256)
def _offered(backend: str, problem: Problem, device: DeviceInfo, settings: Settings) -> Sequence[Choice]:
    if backend not in enabled_backends(device, settings):
        return ()
    alone = _alone(settings, backend)
    legal = legal_offers(problem, device, alone, on_this_machine=backend != "aten")  # torch is always here
    return filtered(legal, alone, templates=TEMPLATES).choices


@functools.lru_cache(maxsize=16)
def _alone(settings: Settings, backend: str) -> Settings:
    """Return the settings with one backend. Making them checks every field."""
    return dataclasses.replace(settings, backends=(backend,))


def without_overlap(choice: Choice, settings: Settings) -> Choice:
    """Return the choice whose kernel is the same and begins when the one before has ended, unless the settings exclude it.

    Layers without measurements run between kernels of torch or Inductor, which let nothing begin early. A launch that waits for
    them in the kernel takes 0.1 to 1.8 µs more there, over six int4 GEMMs of 8 to 36 µs on an H200. A search between other kernels
    picked the plain launch for 31 of 32 int4 and int8 GEMMs of 1 to 64 rows that ``cuda`` served best.
    """
    return _variant(choice, OVERLAP.sub("", choice.name), settings)


def launched_alone(choice: Choice, settings: Settings) -> Choice:
    """Return the choice as layers without measurements launch it: without overlap, and interleaved."""
    plain = without_overlap(choice, settings)
    return _variant(plain, plain.name + INTERLEAVED, settings)


def _variant(choice: Choice, name: str, settings: Settings) -> Choice:
    """Return the launch of that name, or the choice if there is none or the settings exclude it."""
    found = tuple(x for x in choice.launch_variants() if x.name == name)
    return next(iter(filtered(Offers(choices=found), settings, templates=TEMPLATES, capped=False).choices), choice)


def kept_kernels(gains: Sequence[Gains]) -> frozenset[str]:
    """Return the kernels (``kernel_of``) that classes share: one after the other, each the one that adds the most gain."""
    cells: list[dict[str, float]] = []  # the largest gain of each kernel, for each class and M
    for at in (at for one in gains for at in one.values() if at):
        cells.append({})
        for name, gain in at.items():
            cells[-1][kernel_of(name)] = max(gain, cells[-1].get(kernel_of(name), 0.0))
    reached, kept = [0.0] * len(cells), set[str]()
    while len(kept) < MOST_KERNELS:
        added: dict[str, float] = defaultdict(float)
        for before, at in zip(reached, cells, strict=True):
            for kernel, gain in at.items():
                added[kernel] += max(gain - before, 0.0)
        best = max(sorted(added), key=added.__getitem__, default="")
        if not best or added[best] < LEAST_GAIN * len(gains):
            break
        kept.add(best)
        reached = [max(before, at.get(best, 0.0)) for before, at in zip(reached, cells, strict=True)]
    return frozenset(kept)


def ordered(gains: Mapping[str, float], kept: frozenset[str]) -> list[str]:
    """Return the names whose kernels are kept, the largest gain first."""
    return sorted((name for name in gains if kernel_of(name) in kept), key=lambda name: (-gains[name], name))
