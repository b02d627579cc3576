"""A range of M under way: what was measured so far, and what its steps have in common."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..choice import Choice
from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rows import RowClass
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Store
from .candidates import Candidates, candidates_for, choice_of
from .offers import enabled_backends, libraries_of, offers_for
from .precompile import precompile
from .progress import Progress
from .proof import kernels_of
from .remote import AnySession, open_session
from .result import ProblemResult
from .segments import Segment

ROUNDS_S = 0.03
"""How long the rounds go on at an M where a few choices compete: a few samples of each, after half as long for clocks to settle."""
MOST_OF_LIBRARIES = 6
"""So many choices of libraries compete at each anchor, …"""
MOST_OF_OURS = 2
"""… and so many of each backend whose kernels are compiled, …"""
SEARCHED = ("triton",)
"""… but for those whose likely configs are found among thousands: a tenth of a second for each M, as long as measuring takes."""
SEED = 20_000
"""The seed of the random Ms of a proof; the table says which it was."""


Source = Callable[[Problem], Candidates]
"""The choices that compete for a problem."""


@dataclass(slots=True)
class Work:
    """One range under way: what was measured so far, and which choices turned out to be wrong somewhere."""

    rows_class: RowClass
    rows: range
    device: DeviceInfo
    settings: Settings
    host_us: float
    progress: Progress
    source: Source | None = None
    results: dict[int, ProblemResult] = dataclasses.field(default_factory=dict)
    choices: dict[str, Choice] = dataclasses.field(default_factory=dict)
    """The choices by name, each as it was at one of its anchors."""
    anchors: list[int] = dataclasses.field(default_factory=list)
    anchor_of: dict[str, int] = dataclasses.field(default_factory=dict)
    """The M by name at which a choice was found, and will be found again."""
    times: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)
    """The wrong choices by name: at which M, and why."""
    _session: AnySession | None = None

    @property
    def fingerprint(self) -> str:
        """The machine, as the store has it."""
        return fingerprint_text(self.device, self.settings.timing)

    def candidates(self, m: int) -> Candidates:
        """The choices that compete at an M: where one has to do all, those that say to be batch-invariant, and torch's own beside
        them, so that no other pushes them out of the final rounds.
        """
        problem = self.rows_class.at(m)
        if self.source:
            return self.source(problem)
        found = candidates_for(problem, self.device, self.settings, host_us=self.host_us)
        if not self.settings.batch_invariant or not any(c.batch_invariant for c in found.offers.choices):
            return found
        kept = tuple(c for c in found.offers.choices if c.baseline or c.batch_invariant)
        offers = dataclasses.replace(found.offers, choices=kept)
        return dataclasses.replace(found, offers=offers, choices={c.content_hash: c for c in kept}, closed=True)

    def found(self, x: Segment, store: Store) -> Choice | None:
        """The choice of a segment as it is at its anchor, or None where it is not there any more."""
        problem = self.rows_class.at(x.anchor)
        if self.source is not None:
            return self.source(problem).stored(store).choices.get(x.content_hash)
        return choice_of(x.content_hash, x.backend, problem, self.device, self.settings, store)

    @property
    def baseline(self) -> str:
        """The name of torch's own operation; empty where it does not compete."""
        return next((name for name, choice in self.choices.items() if choice.baseline), "")

    def ready(self, m: int) -> list[Choice]:
        """What backends have for an M of which nothing has to be compiled, the likely best of each first.

        A library has algorithms for a few Ms that it offers at no other (on an H200 cuBLASLt for 4096x14336 at M = 73 and 140, 12%
        faster than torch's own), and what kernels of ours do best follows M in steps.
        """
        asked = tuple(name for name in enabled_backends(self.device, self.settings) if name not in SEARCHED)
        if self.source is not None or not asked:
            return []
        libraries, found, counts = libraries_of(self.device, self.settings), [], Counter[str]()
        offers = offers_for(self.rows_class.at(m), self.device, dataclasses.replace(self.settings, backends=asked))
        for choice in offers.choices:
            counts[choice.backend] += not choice.baseline and choice.compiled
            most = MOST_OF_LIBRARIES if choice.backend in libraries else MOST_OF_OURS
            if choice.compiled and not choice.baseline and counts[choice.backend] <= most:
                found.append(choice)
        return found

    def take(self, m: int, choice: Choice) -> str:
        """Note a choice that is offered at an M; its name."""
        self.choices.setdefault(choice.name, choice)
        self.anchor_of.setdefault(choice.name, m)
        return choice.name

    def session(self) -> AnySession:
        """The session in which choices are timed where not everything competes: for the largest M, whose weights others share."""
        if self._session is None:
            largest = max(m for m in (self.rows_class.within(self.rows)[-1], *self.anchors))
            self._session = open_session(self.rows_class.at(largest), self.device, self.settings, self.host_us)
        return self._session

    def close(self) -> None:
        """Close that session, so that another one finds its memory and its process free."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def right(self, m: int) -> dict[str, float]:
        """The times at an M of what is not known to be wrong."""
        return {name: time_us for name, time_us in self.times[m].items() if name not in self.wrong}

    def at(self, name: str, m: int) -> Choice | str:
        """The choice at an M, or why it is not legal there."""
        return self.choices[name].at(self.rows_class.at(m), self.device)


def segment_of(work: Work, name: str, lo: int, hi: int) -> Segment:
    """The interval for a choice, with its time at the last anchor inside."""
    inside = sorted(m for m, times in work.times.items() if lo <= m <= hi and name in times)
    anchor = work.anchor_of[name]
    time_us = work.times.get(inside[-1] if inside else anchor, {}).get(name)
    return Segment.of(work.choices[name], lo, hi, anchor, time_us=time_us)


def measured(work: Work, m: int, names: Iterable[str]) -> Mapping[str, float]:
    """Times that compare of choices at an M where not everything competes. They are proved later, over their intervals."""
    here = {name: at for name in names if name not in work.wrong and isinstance(at := work.at(name, m), Choice)}
    failures = precompile(list(here.values()), work.settings)
    for name, choice in here.items():
        if choice.name in failures:
            work.wrong[name] = f"M = {m}: {failures[choice.name].reason}"
    right = {name: choice for name, choice in here.items() if name not in work.wrong}
    if not right:
        return {}
    times = work.session().rank(list(right.values()), ROUNDS_S).times
    return {name: times[choice.name].time_us for name, choice in right.items() if choice.name in times}


def with_kernels(work: Work, x: Segment) -> Segment:
    """The segment with an M for each compiled kernel that it needs."""
    kernels = kernels_of(work.choices[x.name], range(x.lo, x.hi + 1), work.rows_class, work.device)
    return dataclasses.replace(x, kernels=tuple(choice.problem.m for choice in kernels))


def uncompiled(work: Work, segments: Sequence[Segment]) -> dict[str, str]:
    """Compile the kernels of the segments; by name, why something does not compile."""
    needed = [(x.name, at) for x in segments for m in x.kernels if isinstance(at := work.at(x.name, m), Choice)]
    failures = precompile([at for _, at in needed], work.settings)
    return {name: failures[at.name].reason for name, at in needed if at.name in failures}
