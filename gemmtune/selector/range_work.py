"""A range of M in progress: the measurements so far, and the helpers that its steps share."""

import contextvars
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..choice import Choice
from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rows import RowClass
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store, open_store
from .accidents import accident
from .candidates import Candidates, candidates_for, choice_of
from .finals import refused_after
from .machine_limits import MachineLimits
from .offers import enabled_backends, libraries_of, offers_for
from .precompile import precompile
from .progress import Progress
from .proof import kernels_of
from .remote import AnySession, open_session
from .result import ProblemResult
from .segments import Segment
from .siblings import Siblings

log = logging.getLogger("gemmtune")

ROUNDS_S = 0.03
"""Duration of the rounds in s at an M where few choices compete: a few samples of each, after half as long for clocks to settle."""
MOST_OF_LIBRARIES = 6
"""Maximum number of library choices that compete at each sampled M."""
MOST_OF_OURS = 2
"""Maximum number of choices of each compiling backend that compete at each sampled M."""
SEARCHED = ("triton",)
"""Compiling backends that are left out, because they search thousands of configs for likely ones. That takes a tenth of a second
for each M, as long as the measurement."""
SEED = 20_000
"""The seed of the random Ms of a proof. The table stores it."""


Source = Callable[[Problem], Candidates]
"""Function that returns the choices that compete for a problem."""


@dataclass(slots=True)
class Work:
    """One range in progress: the measurements so far, and the choices that were wrong at some M."""

    rows_class: RowClass
    rows: range
    device: DeviceInfo
    settings: Settings
    host_us: float
    progress: Progress
    source: Source | None = None
    results: dict[int, ProblemResult] = dataclasses.field(default_factory=dict)
    choices: dict[str, Choice] = dataclasses.field(default_factory=dict)
    """The choices by name, each in the form for the M at which it was found."""
    sampled: list[int] = dataclasses.field(default_factory=list)
    found_at: dict[str, int] = dataclasses.field(default_factory=dict)
    """The M at which each choice was found, by name. It is found there again later."""
    times: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    rough: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Times at tuned Ms of all correct choices, those of short measurements included, if a class of them is selected."""
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)
    """The wrong choices by name, with the M and the reason."""
    rechecked: set[str] = dataclasses.field(default_factory=set)
    """The names of the choices that were right after they were timed."""
    limits: MachineLimits | None = None
    apart: float | None = None
    """The factor between two Ms at which all choices compete, by default that of the search effort."""
    compared: Sequence[int] = ()
    """Further Ms at which all choices compete."""
    siblings: Siblings | None = None
    """The weights of one model, of which this is one."""
    agreed: str = ""
    """The reduction class of other stored tables of the product, or of joined weights. This table must have it. Empty: none."""
    _session: AnySession | None = None

    @property
    def fingerprint(self) -> str:
        """The machine, in the store's format."""
        return fingerprint_text(self.device, self.settings.timing)

    @property
    def store(self) -> Store:
        return open_store(self.settings)

    def candidates(self, m: int) -> Candidates:
        """Return the choices that compete at an M."""
        problem = self.rows_class.at(m)
        if self.source:
            return self.source(problem)
        found = candidates_for(problem, self.device, self.settings, host_us=self.host_us)
        return found if self.siblings is None else self.siblings.narrowed(found)

    def found(self, x: Segment) -> Choice | None:
        """Return the choice of a segment at the M where it was found, or None if it no longer exists."""
        problem = self.rows_class.at(x.sampled_m)
        if self.source is not None:
            return self.source(problem).stored(self.store).choices.get(x.content_hash)
        return choice_of(x.content_hash, x.backend, problem, self.device, self.settings, name=x.name)

    @property
    def disturbed(self) -> str:
        """The disturbance of the measurements at tuned Ms, or what the machine left out a choice for; empty if none was seen."""
        seen = (*(result.disturbed for result in self.results.values()), *map(accident, self.wrong.values()))
        return next(filter(None, seen), "")

    @property
    def baseline(self) -> str:
        """The name of torch's own operation; empty if it does not compete."""
        return next((name for name, choice in self.choices.items() if choice.baseline), "")

    def ready(self, m: int) -> list[Choice]:
        """Return the backends' choices for an M that need no compilation, the likely best of each backend first.

        A library has algorithms that it offers only for a few Ms. On an H200, cuBLASLt offers one for 4096x14336 at M = 73 and 140
        that is 12% faster than torch's own. The best of our own kernels also changes with M in steps.
        """
        backends = tuple(name for name in enabled_backends(self.device, self.settings) if name not in SEARCHED)
        if self.source is not None or not backends:
            return []
        libraries, found, counts = libraries_of(self.device, self.settings), [], Counter[str]()
        offers = offers_for(self.rows_class.at(m), self.device, dataclasses.replace(self.settings, backends=backends))
        for choice in offers.choices:
            counts[choice.backend] += not choice.baseline and choice.compiled
            most = MOST_OF_LIBRARIES if choice.backend in libraries else MOST_OF_OURS
            if choice.compiled and not choice.baseline and counts[choice.backend] <= most:
                found.append(choice)
        return found

    def take(self, m: int, choice: Choice) -> str:
        """Record a choice that is offered at an M, and return its name."""
        self.choices.setdefault(choice.name, choice)
        self.found_at.setdefault(choice.name, m)
        return choice.name

    def session(self) -> AnySession:
        """Return the session for Ms where only some choices compete. It is made for the largest M and shares its weights."""
        if self._session is None:
            largest = max(m for m in (self.rows_class.within(self.rows)[-1], *self.sampled))
            self._session = open_session(self.rows_class.at(largest), self.device, self.settings, self.host_us)
        return self._session

    def close(self) -> None:
        """Close that session, so that another one has its memory and its process."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def right(self, m: int) -> dict[str, float]:
        """Return the times at an M of the choices that are not known to be wrong."""
        return {name: time_us for name, time_us in self.times[m].items() if name not in self.wrong}

    def at(self, name: str, m: int) -> Choice | str:
        """Return the choice at an M, or why it is illegal there."""
        return self.choices[name].at(self.rows_class.at(m), self.device)


def segment_of(work: Work, name: str, lo: int, hi: int) -> Segment:
    """Return the segment for a choice, with its time at the last sampled M inside."""
    inside = sorted(m for m, times in work.times.items() if lo <= m <= hi and name in times)
    at = work.found_at[name]
    time_us = work.times.get(inside[-1] if inside else at, {}).get(name)
    return Segment.of(work.choices[name], lo, hi, at, time_us=time_us)


def measured(work: Work, m: int, names: Iterable[str]) -> Mapping[str, float]:
    """Return comparable times of choices at an M where only some compete. A later proof covers their intervals."""
    here = {name: at for name in names if name not in work.wrong and isinstance(at := work.at(name, m), Choice)}
    failures = precompile(list(here.values()), work.settings)
    for name, choice in here.items():
        if choice.name in failures:
            work.wrong[name] = f"M = {m}: {failures[choice.name].reason}"
    right = {name: choice for name, choice in here.items() if name not in work.wrong}
    if not right:
        return {}
    ranked = work.session().rank(list(right.values()), ROUNDS_S).times
    times = {name: ranked[choice.name].time_us for name, choice in right.items() if choice.name in ranked}
    refused = _refused(work, m, {name: right[name] for name in times}, times)
    if not refused:
        return times
    work.wrong |= refused
    return measured(work, m, names)  # others were dropped because they are slower


def _refused(work: Work, m: int, choices: Mapping[str, Choice], times: Mapping[str, float]) -> dict[str, str]:
    """Return the reasons against choices at an M by name. What a choice computes after the timing is checked once."""
    direct = {name: time_us - work.host_us for name, time_us in times.items()}
    known = {work.baseline, *work.rechecked}
    found = refused_after(work.session(), work.rows_class.at(m), choices, direct, work.limits, known)
    work.rechecked |= choices.keys() - found.keys()
    for name, sample in found.items():
        log.warning("%s: excluding %s: M = %d: %s: %s", work.rows_class, name, m, sample.status, sample.reason)
    return {name: f"M = {m}: {sample.status}: {sample.reason}" for name, sample in found.items()}


def with_kernels(work: Work, x: Segment) -> Segment:
    """Return the segment with an M for each compiled kernel that it needs."""
    kernels = kernels_of(work.choices[x.name], range(x.lo, x.hi + 1), work.rows_class, work.device)
    return dataclasses.replace(x, kernels=tuple(choice.problem.m for choice in kernels))


def uncompiled(work: Work, segments: Sequence[Segment]) -> dict[str, str]:
    """Compile the kernels of the segments. Return the failures by the name of the choice."""
    needed = [(x.name, at) for x in segments for m in x.kernels if isinstance(at := work.at(x.name, m), Choice)]
    failures = precompile([at for _, at in needed], work.settings)
    return {name: failures[at.name].reason for name, at in needed if at.name in failures}


def ready_ahead(work: Work, rows: Sequence[int]) -> Iterator[list[Choice]]:
    """Yield the compiled choices for each M, looked up in a thread on a GPU. On a CPU that would disturb the measurement."""
    if work.device.type == "cpu":
        yield from map(work.ready, rows)
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="gemmtune-ready") as executor:
            context = contextvars.copy_context()  # the cache of kernels depends on the settings of the caller
            yield from executor.map(lambda m: context.run(work.ready, m), rows)
