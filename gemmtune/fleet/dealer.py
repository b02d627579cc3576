"""Dealer of tasks to seats: the longest expected task first, each to one seat at a time. Pure: it knows no clock and no process."""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .job import Job

MOST_KILLS = 2
"""Processes that a task may end before it counts as failed."""
MOST_LOST_SEATS = 5
"""Seats that may leave during a task before it counts as failed. A node rarely dies of the task that it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One job for one kind of device. ``kind`` is the device's fingerprint: equal devices share their measurements."""

    job: Job
    kind: str
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Task in the hands of a seat since ``begun_s``. ``ticket`` tells two deals of one task apart."""

    ticket: int
    task: Task
    seat: str
    begun_s: float


@dataclass(slots=True)
class _Losses:
    kills: int = 0
    lost_seats: int = 0
    seats: set[str] = field(default_factory=set)


class Dealer:
    """Tasks that wait, tasks that run, and the seats that take them. Seats are named by unique texts.

    A task that a seat lost waits again, and other seats of its kind get it first. An answer counts once: later answers to the same
    task, from a seat that was believed dead, are refused.
    """

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._waiting: list[Task] = []
        self._running: dict[str, Deal] = {}
        self._losses: dict[Task, _Losses] = {}
        self.seats: dict[str, str] = {}
        """Kinds of the seats, by name."""
        self.dealt_again = 0
        """Number of deals of tasks that a seat had lost."""
        self._spent_s = self._planned_s = 0.0

    @property
    def finished(self) -> bool:
        """True if no task waits or runs."""
        return not self._waiting and not self._running

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks. The longest comes first, and equal ones stay in order."""
        self._waiting = sorted([*self._waiting, *tasks], key=lambda task: -task.expected_s)

    def join(self, seat: str, kind: str) -> None:
        """Add a seat that takes tasks of its kind."""
        self.seats[seat] = kind

    def upcoming(self, kind: str, count: int) -> list[Task]:
        """Return the next tasks of a kind."""
        return list(itertools.islice((task for task in self._waiting if task.kind == kind), count))

    def running_on(self, seat: str) -> Deal | None:
        """Return the deal in the hands of a seat."""
        return self._running.get(seat)

    def next(self, seat: str, now_s: float) -> Deal | None:
        """Deal the next task, or return None. One that this seat lost waits for another seat of its kind, if there is one."""
        kind = self.seats[seat]
        others = [name for name, other in self.seats.items() if other == kind and name != seat]
        for place, task in enumerate(self._waiting):
            lost = self._losses.get(task)
            if task.kind != kind or (lost and seat in lost.seats and any(name not in lost.seats for name in others)):
                continue
            del self._waiting[place]
            self.dealt_again += lost is not None
            deal = Deal(ticket=next(self._tickets), task=task, seat=seat, begun_s=now_s)
            self._running[seat] = deal
            return deal
        return None

    def done(self, deal: Deal, seconds: float) -> bool:
        """End a deal with an answer. Return False if the seat no longer has the task: then the answer does not count."""
        if self._running.get(deal.seat) != deal:
            return False
        del self._running[deal.seat]
        self._planned_s += deal.task.expected_s
        self._spent_s += seconds
        return True

    def lost(self, deal: Deal, *, killed: bool) -> bool:
        """Take a task back and return True unless it was lost too often. ``killed``: its process died, not the whole seat."""
        if self._running.get(deal.seat) != deal:
            return True
        del self._running[deal.seat]
        losses = self._losses.setdefault(deal.task, _Losses())
        losses.seats.add(deal.seat)
        losses.kills += killed
        losses.lost_seats += not killed
        if losses.kills >= MOST_KILLS or losses.lost_seats >= MOST_LOST_SEATS:
            return False
        self.add([deal.task])
        return True

    def leave(self, seat: str) -> Deal | None:
        """Remove a seat, and return what was in its hands."""
        self.seats.pop(seat, None)
        return self.running_on(seat)

    def orphans(self) -> list[Task]:
        """Remove the waiting tasks whose kind has no seat, and return them."""
        found = [task for task in self._waiting if task.kind not in self.seats.values()]
        self._waiting = [task for task in self._waiting if task not in found]
        return found

    def remaining_s(self, now_s: float) -> float:
        """Return the expected time until everything is done, corrected by tasks that are done or take longer than expected."""
        late = [(now_s - x.begun_s, x.task.expected_s) for x in self._running.values() if now_s - x.begun_s > x.task.expected_s]
        spent, planned = self._spent_s + sum(x for x, _ in late), self._planned_s + sum(y for _, y in late)
        pace = spent / planned if planned else 1.0
        times = [0.0]
        for kind in {task.kind for task in self._waiting} | {deal.task.kind for deal in self._running.values()}:
            running = [deal for deal in self._running.values() if deal.task.kind == kind]
            busy = [max(0.0, pace * deal.task.expected_s - (now_s - deal.begun_s)) for deal in running]
            idle = sum(of == kind for of in self.seats.values()) - len(running)
            waiting = [pace * task.expected_s for task in self._waiting if task.kind == kind]
            times.append(makespan(waiting, [*busy, *[0.0] * max(idle, 0)] or [0.0]))
        return max(times)


def makespan(times: Sequence[float], busy: Sequence[float]) -> float:
    """Return the time until seats have done all tasks, the longest task first. ``busy`` has the time until each seat is free."""
    free = list(busy)
    heapq.heapify(free)
    for time_s in sorted(times, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + time_s)
    return max(free)
