"""Reduction classes of a range in progress, ranked by what they lose to the best choices."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ..choice import Choice, Status
from ..numerics.reduction import ALONE, Reduction
from .crossover import Times
from .offers import enabled_backends, widest_offers_for
from .range_work import Work
from .remote import open_session

Offered = dict[Reduction | None, list[Choice]]
"""Choices by class, the likeliest first."""

MOST_RANKED = 4
"""Number of classes that compete at the tuned Ms."""
MOST_OVER_TORCH, VIOLATION = 1.07, 0.05
"""Slowdown against torch's own operation that a class may have at one M. A class beyond it is worse by whole steps of the logarithm
of VIOLATION, because times vary."""
MISSING, DIVIDED = 1.0, 0.15
"""Losses at an M where a class has no measured choice: a slowdown of e where no backend offers one, less where one does."""
LISTED = ("triton", "cuda")
"""Backends that list every legal config within a second, the likeliest first."""
LIKELIEST, MOST_ALIKE = 3, 2
"""Number of choices of each class and family that compete at an M, and of those with one tile."""
LEAST_IN_RUNS = 128
"""Least M at which programs that sum all parts of a tile compete with split ones. Below, tiles are few."""
MOST_FLOPS: int = 2**36
"""Operations of the product on a CPU, about a second, whose rows the bits of others are compared with."""


def class_of(choice: Choice | None) -> Reduction | None:
    """Return the class that a choice declares. One that only promises batch invariance has a class of its own. None: nothing."""
    if choice is None or not choice.batch_invariant:
        return None
    return choice.claims.reduction or Reduction.alone(choice.name)


def members_of(work: Work, reduction: Reduction) -> list[str]:
    """Return the names of the choices of a class that are not known to be wrong."""
    return [name for name, choice in work.choices.items() if name not in work.wrong and class_of(choice) == reduction]


def classes_of(work: Work) -> list[Reduction]:
    """Return the declared classes of all choices."""
    return list(dict.fromkeys(x for choice in work.choices.values() if (x := class_of(choice)) is not None))


def likely_classes(work: Work, offered: Mapping[int, Offered | None]) -> list[Reduction]:
    """Return the classes that compete at the tuned Ms: an agreed one, the likeliest of one run, and the likeliest of all."""

    def key(x: Reduction) -> tuple[bool, float, str]:
        missing = {m: _missing_loss(x, m, offered[m]) for m in work.rough}
        return str(x) != work.agreed, mean_loss(work.rough, set(members_of(work, x)), missing), str(x)

    classes = sorted(classes_of(work), key=key)
    run = next((x for x in classes if not (x.parts or x.order or x.unit == ALONE)), None)
    first = [x for x in classes if str(x) == work.agreed or x == run]
    return [*first, *(x for x in classes if x not in first)][:MOST_RANKED]


def _missing_loss(reduction: Reduction, m: int, offered: Offered | None) -> float:
    """Return the loss of a class at an M where none of its choices is measured yet."""
    if reduction.unit == ALONE:
        return MISSING
    if offered is None:  # one run, and parts in rising order, are had by changing a choice
        return MISSING if reduction.order else DIVIDED
    whole = dataclasses.replace(reduction, parts=())
    return DIVIDED if reduction in offered or (_runs_in_parts(reduction, m) and whole in offered) else MISSING


def _runs_in_parts(reduction: Reduction, m: int) -> bool:
    """Return True if programs that sum the parts of a tile one after another compete at an M."""
    return bool(reduction.parts) and not reduction.order and m >= LEAST_IN_RUNS


def offered_at(work: Work, m: int) -> Offered | None:
    """Return the choices of an exhaustive search for an M by class, the likeliest first. None: no backend lists all of them."""
    backends = tuple(name for name in enabled_backends(work.device, work.settings) if name in LISTED)
    if work.source is not None or work.device.type == "cpu" or not backends:
        return None
    settings = dataclasses.replace(work.settings, backends=backends)
    by_class: Offered = {}
    for choice in widest_offers_for(work.rows_class.at(m), work.device, settings).choices:
        by_class.setdefault(class_of(choice), []).append(choice)
    return by_class


def likeliest_in(work: Work, m: int, offered: Offered | None, classes: Sequence[Reduction]) -> list[Choice]:
    """Return the likeliest ``offered`` choices of each class for an M, and those with one run divided as the class does.

    The list of a search may have none of a class.
    """
    found: list[Choice] = []
    if offered is None:
        return found
    for reduction in classes:
        found += _unalike(offered.get(reduction, ()))
        if _runs_in_parts(reduction, m):
            whole = _unalike(offered.get(dataclasses.replace(reduction, parts=()), ()))
            divided = (made for choice in whole for made in choice.with_parts(len(reduction.parts), work.device))
            found += [choice for choice in divided if class_of(choice) == reduction and choice.info.get("splits") == 1]
    return list({choice.name: choice for choice in found}.values())


def _unalike(choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yield the first LIKELIEST choices of each family, of unequal tiles, with MOST_ALIKE that differ along K alone."""
    alike, counts, tiles = Counter[tuple[str, ...]](), Counter[str](), set[tuple[str, ...]]()
    for choice in choices:
        family = _FAMILY.match(choice.name)[0] + str(choice.info.get("swap_ab"))  # type: ignore[index] # it matches anything
        tile = family, *map(str, choice.info.get("tile") or (choice.name,))
        if tile not in tiles and alike[tile[:3]] < MOST_ALIKE and counts[family] < LIKELIEST:
            tiles.add(tile)
            alike[tile[:3]] += 1
            counts[family] += 1
            yield choice


_FAMILY = re.compile(r"\D*")
"""Start of a choice's name: its backend and family."""


def ranked(work: Work) -> list[Reduction]:
    """Return the declared classes, an agreed one first, by their largest loss to torch beyond a limit, then by their mean loss."""
    by_mean = sorted(classes_of(work), key=lambda x: (mean_loss(work.times, set(members_of(work, x))), str(x)))
    best = {x: _best_us(work, x) for x in by_mean[:MOST_RANKED]}
    means = {x: sum(_losses(work.times, own)) for x, own in best.items()}
    worst = {x: max(_losses(work.times, own, work.baseline), default=0.0) for x, own in best.items()}
    if work.rows_class.problem.widens_b:  # torch widens weights first, which is no measure of a kernel
        worst = dict.fromkeys(worst, 0.0)
    steps = {x: max(math.ceil((loss - math.log(MOST_OVER_TORCH)) / VIOLATION), 0) for x, loss in worst.items()}
    likely = sorted(best, key=lambda x: (steps[x], means[x], str(x)))
    return sorted([*likely, *by_mean[MOST_RANKED:]], key=lambda x: str(x) != work.agreed)


def _best_us(work: Work, reduction: Reduction) -> dict[int, float]:
    """Return the least time of a class at each sampled M, with a faster choice that declares nothing where its bits are equal."""
    members = members_of(work, reduction)
    found = _least(work.times, set(members))
    reference = reference_of(work, members)
    whole = work.at(reference, top_row(work)) if reference is not None else None
    if not isinstance(whole, Choice) or whole.problem.groups:
        return found
    with open_session(whole.problem, work.device, work.settings) as session:
        for m, here in work.times.items():
            faster = [x for x, us in here.items() if us < found.get(m, math.inf) and class_of(work.choices[x]) is None]
            for name in sorted(faster, key=here.__getitem__) if m <= whole.problem.m else ():
                at = work.at(name, m)
                if isinstance(at, Choice) and session.same_rows(whole, [at]).status is Status.OK:
                    found[m] = here[name]
                    break
    return found


def _least(times: Times, members: set[str]) -> dict[int, float]:
    """Return the least time of some choices at each M where one was measured."""
    own = {m: [us for name, us in here.items() if name in members and us > 0] for m, here in times.items()}
    return {m: min(us) for m, us in own.items() if us}


def mean_loss(times: Times, members: set[str], missing: Mapping[int, float] | None = None) -> float:
    """Return the mean logarithm of the slowdown of some choices against the best, and the ``missing`` loss where none is timed."""
    losses = _losses(times, _least(times, members), missing=missing or {})
    return sum(losses) / max(len(losses), 1)


def _losses(times: Times, own: Mapping[int, float], against: str = "", missing: Mapping[int, float] | None = None) -> list[float]:
    """Return the logarithm of the slowdown of the ``own`` times at each M, against the best or where it was measured one choice."""
    losses = []
    for m, here in times.items():
        best = here.get(against, 0.0) if against else min((us for us in here.values() if us > 0), default=0.0)
        losses.append((missing or {}).get(m, MISSING) if m not in own else math.log(own[m] / best) if best > 0 else 0.0)
    return losses


def top_row(work: Work) -> int:
    """Return the largest M whose rows are compared: the end of the range, on a CPU less if the product takes long."""
    rows = work.rows_class.within(work.rows)
    if work.device.type != "cpu":
        return rows[-1]
    most: int = max(MOST_FLOPS // max(work.rows_class.at(rows[0]).flops // rows[0], 1), rows[0])
    tried = [rows[0], *rows[:: max(len(rows) // 64, 1)], rows[-1]]
    found: int = max(m for m in tried if m <= most)
    return found


def reference_of(work: Work, members: Sequence[str]) -> str | None:
    """Return the choice with whose bits others are compared: one that serves both ends of the range, or else the end."""
    ends = work.rows_class.within(work.rows)[0], top_row(work)
    legal = [name for name in members if isinstance(work.at(name, ends[1]), Choice)]
    both = (name for name in legal if isinstance(work.at(name, ends[0]), Choice))
    return next(both, next(iter(legal), None))
