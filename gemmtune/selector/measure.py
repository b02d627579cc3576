"""Compilation, verification and timing of the choices of one problem that have no outcome yet."""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..choice import Choice, Status
from ..effort import EFFORT
from ..settings import Settings
from ..timing.neighbours import drifts_too_far, wait_until_quiet
from .accidents import done_by_machine
from .candidates import Candidates
from .finals import Measuring, play_finals
from .machine_limits import MachineLimits
from .offers import untried_variants
from .pick import right, shortlist
from .precompile import Compilation, precompile
from .progress import Progress
from .remote import AnySession, open_session
from .result import ALONE, DISTURBED, HOST_US, LIMIT_S, LIMITS, MARGIN_US, PLACE, SETTLED, Outcome
from .samples import Sample

WAVES = 2
"""Rounds of offers: those tried first, then the others unless the first suffice."""


def measure(
    candidates: Candidates,
    outcomes: dict[str, Outcome],
    progress: Progress,
    compilation: Compilation | None = None,
    limits: MachineLimits | None = None,
) -> Candidates:
    """Add an outcome for every offer without one and for variants of the fastest, then rank the fastest against each other.

    ``compilation`` runs in the background; choices that it does not include are compiled here. ``Measuring`` describes ``outcomes``
    and ``limits``. Return the candidates, the tried variants included.
    """
    if candidates.late and candidates.picked is not None:
        return candidates
    todo, settings = candidates.missing, candidates.settings
    effort = EFFORT[settings.search]
    with open_session(candidates.problem, candidates.device, settings, candidates.host_us) as session:
        x = Measuring(session, candidates, outcomes, progress, limits)

        def examine(choices: Sequence[Choice]) -> None:
            known = {**x.candidates.choices, **{c.content_hash: c for c in choices}}
            x.candidates = dataclasses.replace(x.candidates, choices=known)
            examine_all(x, sorted(choices, key=lambda c: not c.baseline))

        if settings.busy == "wait":
            wait_until_quiet(candidates.device, progress.message)
        if todo or untried_variants(candidates.choices, outcomes, settings):
            x.drift = drift_since(session, candidates, outcomes)
        # Compilers on the CPU do not change kernel times on a GPU, but they do change the time of a whole call.
        unaffected_by_compilers = candidates.device.type != "cpu" and settings.timing != "eager"
        # Offers first: those that need no compilation, then the compiled ones, then those that wait for the favoured. Then launch
        # variants of the fastest. If one of them is refused, variants of the next best one.
        refused = True
        while refused:
            for _ in range(WAVES):
                examine([c for c in todo if unaffected_by_compilers and (c.compile_key is None or c.compiled)])
                examine(_compiled(x, [c for c in todo if c.content_hash not in outcomes], compilation))
                todo = x.candidates.untried(outcomes)
            for _ in range(effort.variant_rounds):
                examine(untried_variants(x.candidates.choices, outcomes, settings))
            refused = rank(x, effort.entrants)
            todo = x.candidates.untried(outcomes)
            refused |= bool(todo) and candidates.deadline == math.inf
    return x.candidates


def examine_alone(candidates: Candidates, choice: Choice) -> Outcome:
    """Compile, verify and briefly measure one candidate in isolation. The outcome stays unsettled, for later tuning to compare."""
    with open_session(candidates.problem, candidates.device, candidates.settings, candidates.host_us) as session:
        x = Measuring(session, candidates, {}, Progress())
        examine_all(x, _compiled(x, [choice], None))
    return x.outcomes[choice.content_hash]


def _compiled(x: Measuring, choices: Sequence[Choice], compilation: Compilation | None) -> Sequence[Choice]:
    """Return the choices that compile in time. Give each that fails to compile an outcome."""
    report = functools.partial(x.progress.stage, "compile")
    until = (time.monotonic() + x.candidates.deadline) / 2  # the rest is for measuring
    failures = compilation.wait(choices, report, until) if compilation else {}
    failures |= precompile([c for c in choices if c.name not in failures], x.candidates.settings, report, until)
    for choice in choices:
        if choice.name in failures:
            x.outcomes[choice.content_hash] = outcome(choice, x.candidates, failures[choice.name])
    return [c for c in choices if c.name not in failures and (until == math.inf or c.compile_key is None or c.compiled)]


def examine_all(x: Measuring, choices: Sequence[Choice]) -> None:
    """Verify and briefly measure choices. Each gets an outcome."""
    if not choices:
        return
    for done, choice in enumerate(choices):
        if x.candidates.late and not choice.baseline:
            break
        x.progress.stage("verify and measure", done, len(choices))
        known = right(x.outcomes.values())
        best_us = known[0].time_us if known else None
        sample = x.session.examine(choice, best_us * x.drift if best_us else None)
        undrifted = dataclasses.replace(sample, time_us=sample.time_us / x.drift if sample.time_us else None)
        x.outcomes[choice.content_hash] = outcome(choice, x.candidates, undrifted)
    x.progress.stage("verify and measure", len(choices), len(choices))


def drift_since(session: AnySession, candidates: Candidates, outcomes: Mapping[str, Outcome]) -> float:
    """Return the slowdown of the fastest known choice since it was ranked, by which new times are divided; 1 if unknown.

    It is also 1 if clocks do not explain it: one of the two times is then wrong, and scaling would store wrong times.
    """
    known = right(outcomes.values())
    fastest = next((o for o in known if o.finalist), known[0] if known else None)
    if fastest is None:
        return 1.0
    now_us = session.examine(candidates.choices[fastest.content_hash], None).time_us
    drift = now_us / fastest.time_us if now_us and fastest.time_us else 1.0
    return 1.0 if drifts_too_far(candidates.device, drift) else drift


def rank(x: Measuring, entrants: int) -> bool:
    """Give the fastest choices, at most ``entrants``, comparable times by interleaved final rounds.

    Choices from earlier rankings take no part, except the fastest two. New times are scaled by the drift of these two. One new
    choice then costs one measurement and still compares with the old ones. Return True if a choice was refused after it was timed:
    others may have been dropped because of its time, and nothing is settled.
    """
    candidates, outcomes = x.candidates, x.outcomes
    # Short measurements compare with each other and, roughly, with ranked times. A choice that lost once is out.
    running = [o for o in outcomes.values() if o.finalist or not o.settled]
    if candidates.device.type == "cpu":  # next to other processes a short measurement may be off by any factor
        finalists = shortlist(running, entrants, near=math.inf)
    else:
        finalists = shortlist(running, entrants, lambda o: candidates.choices[o.content_hash].compile_key)
    fresh = [o for o in finalists if not o.finalist]
    # Choices that are far faster than all earlier finalists still run against the best of them: only ranked times decide.
    incumbents = [o for o in finalists if o.finalist][:2] or right(o for o in running if o.finalist)[:1]
    if fresh and play_final_rounds(x, fresh, incumbents):
        return True
    settled = ALONE if len(right(outcomes.values())) == 1 else True
    for digest, o in outcomes.items():
        if not o.settled:
            outcomes[digest] = dataclasses.replace(o, info=o.info | {SETTLED: settled})
    return False


def play_final_rounds(x: Measuring, fresh: Sequence[Outcome], incumbents: Sequence[Outcome]) -> bool:
    """Rank the fresh finalists together with the incumbents, which give the scale. Mark all new outcomes on a busy machine.

    If the incumbents differ by a factor that clocks do not explain, one of their times is wrong. Nothing is then scaled, and the
    incumbents get new times too. Return True if a choice was refused after it was timed.
    """
    candidates, outcomes, count = x.candidates, x.outcomes, len(fresh) + len(incumbents)
    if candidates.settings.busy == "wait":
        wait_until_quiet(candidates.device, x.progress.message)
    x.progress.stage("final rounds", 0, count)
    finals = play_finals(x, fresh, incumbents)
    # Record the choices that failed.
    for o in (*fresh, *incumbents):
        if failure := finals.failures.get(o.name):
            info = o.info | circumstances(failure, candidates.settings)
            outcomes[o.content_hash] = dataclasses.replace(
                o, status=failure.status, reason=failure.reason, time_us=None, error_over_bound=None, finalist=False, info=info
            )
    # Scale the new times by the drift of the incumbents.
    anew = drifts_too_far(candidates.device, finals.scale)
    factor = 1.0 if anew else finals.scale
    for o in (*fresh, *incumbents) if anew else fresh:
        if o.name in finals.times:
            time_us, margin_us = finals.times[o.name].time_us * factor, finals.times[o.name].margin_us * factor
            info = {name: value for name, value in o.info.items() if name != DISTURBED} | {MARGIN_US: margin_us}
            outcomes[o.content_hash] = dataclasses.replace(
                o, time_us=time_us, finalist=True, from_store=o.from_store and not anew, info=info
            )
    x.progress.stage("final rounds", count, count)
    # Mark the new outcomes if other work disturbed them.
    if finals.why:
        for digest, o in outcomes.items():
            if o.status is Status.OK and not o.from_store:
                outcomes[digest] = dataclasses.replace(o, info=o.info | {DISTURBED: finals.why})
    return finals.refused


def circumstances(failure: Sample, settings: Settings) -> dict[str, Any]:
    """Return the circumstances of a failure for ``info``: what the machine did, and the time limit that was exceeded."""
    found: dict[str, Any] = {DISTURBED: why} if (why := done_by_machine(failure)) else {}
    if failure.status in LIMITS:
        found[LIMIT_S] = getattr(settings, LIMITS[failure.status])
    return found


def outcome(choice: Choice, candidates: Candidates, sample: Sample) -> Outcome:
    """Return the outcome of one candidate."""
    info = dict(choice.info)
    place = list(candidates.choices).index(choice.content_hash)
    if place < len(candidates.offers.choices):  # the offers come first, in their order
        info[PLACE] = place
    if candidates.host_us:
        info[HOST_US] = candidates.host_us
    info |= circumstances(sample, candidates.settings)
    return Outcome(
        name=choice.name,
        backend=choice.backend,
        content_hash=choice.content_hash,
        status=sample.status,
        time_us=sample.time_us,
        error_over_bound=sample.error_over_bound,
        reason=sample.reason,
        baseline=choice.baseline,
        info=info,
    )
