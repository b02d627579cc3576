"""Final rounds of one problem: comparable times, results checked after the timing, and a repetition on a busy machine."""

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..choice import Choice, Status
from ..problem import Problem
from ..timing import neighbours
from ..timing.rounds import BUSY_MARK, Ranked
from .candidates import Candidates
from .machine_limits import MachineLimits
from .progress import Progress
from .remote import AnySession
from .result import Outcome
from .samples import Sample
from .walls import refusals


@dataclass(slots=True)
class Measuring:
    """Measurements of one problem in one session. ``outcomes``, by content hash, fill as the work proceeds.

    An interruption thus loses only the current measurement. New times are divided by ``drift``. ``limits`` rule out times that the
    hardware cannot reach.
    """

    session: AnySession
    candidates: Candidates
    outcomes: dict[str, Outcome]
    progress: Progress
    limits: MachineLimits | None = None
    drift: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """Result of the final rounds by the name of the choice."""

    times: Mapping[str, Ranked]
    failures: Mapping[str, Sample]
    refused: bool
    """True if a choice failed that had a time: others may have been dropped because of it."""
    scale: float
    """Earlier time of the incumbents divided by their time now."""
    why: str
    """Reason why the times are unreliable, or ""."""


def play_finals(x: Measuring, fresh: Sequence[Outcome], incumbents: Sequence[Outcome]) -> Finals:
    """Rank the choices. Rounds that other work disturbed are played once more, unless the settings accept a busy machine."""
    first = _play(x, [*fresh, *incumbents], incumbents)
    if not (first.why and first.times) or x.candidates.settings.busy == "accept":
        return first
    second = _play(x, [o for o in (*fresh, *incumbents) if o.name in first.times], incumbents)
    failures = {**first.failures, **second.failures}
    # Other work on the machine only adds to times.
    slower = sum(math.log(first.times[name].time_us / again.time_us) for name, again in second.times.items()) < 0
    better = first if second.why and not second.failures and slower else second
    return dataclasses.replace(better, failures=failures, refused=first.refused or second.refused)


def _play(x: Measuring, entrants: Sequence[Outcome], incumbents: Sequence[Outcome]) -> Finals:
    """Rank the choices and check their results. After a refusal rank the others again: rounds drop whatever is slower."""
    failures: dict[str, Sample] = {}
    refused = False
    while True:
        ranking = x.session.rank([x.candidates.choices[o.content_hash] for o in entrants])
        choices = {o.name: x.candidates.choices[o.content_hash] for o in entrants if o.name in ranking.times}
        direct = {name: ranking.times[name].time_us - x.candidates.host_us for name in choices}
        late = refused_after(x.session, x.candidates.problem, choices, direct, x.limits)
        failures |= {**ranking.failures, **late}
        entrants = [o for o in entrants if o.name in ranking.times and o.name not in late]
        refused = refused or bool(late)
        if not late or not entrants:
            break
    times = {o.name: ranking.times[o.name] for o in entrants}
    drift = [o.time_us / times[o.name].time_us for o in incumbents if o.time_us and o.name in times]
    scale = statistics.median(drift) if drift else 1.0
    torch = next((times[o.name] for o in entrants if o.baseline), None)
    why = neighbours.disturbance(x.candidates.device, ranking.seen, torch.spread if torch else 0.0, 1 / scale)
    return Finals(times=times, failures=failures, refused=refused, scale=scale, why=why)


def refused_after(
    session: AnySession,
    problem: Problem,
    choices: Mapping[str, Choice],
    times_us: Mapping[str, float],
    limits: MachineLimits | None,
    known: Collection[str] = (),
) -> dict[str, Sample]:
    """Return the choices that are wrong after the timing, deceive, or take less time than the hardware can, by the caller's names.

    ``times_us`` are without gemmtune's host time. Choices in ``known`` passed the first two checks.
    """
    new = {choice.name: name for name, choice in choices.items() if name not in known}
    found = {new[name]: sample for name, sample in session.recheck([choices[name] for name in new.values()]).items()}
    direct = {name: time_us for name, time_us in times_us.items() if name not in found}
    dishonest = refusals(choices, direct, known)
    found |= {name: Sample(status=Status.DISHONEST, reason=reason) for name, reason in dishonest.items()}
    if limits is None:
        return found
    direct = {name: time_us for name, time_us in direct.items() if name not in found}
    torch_us = next((direct.pop(name) for name, choice in choices.items() if choice.baseline and name in direct), None)
    reasons = limits.too_fast(session, problem, direct, torch_us)
    mark = f" ({BUSY_MARK})" if reasons and limits.known().disturbed_for(problem) else ""
    return found | {name: Sample(status=Status.TOO_FAST, reason=reason + mark) for name, reason in reasons.items()}
