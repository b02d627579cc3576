"""Run of a fleet: seats open, tasks are dealt to them, and their answers are stored, in one loop."""

import contextlib
import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import StoreError, UnavailableError
from ..interrupts import finishing
from ..selector.progress import Progress
from ..selector.result import ProblemResult
from ..selector.text_table import counted
from ..settings import Settings
from ..store.exchange import from_json
from ..store.store import Store
from .dealer import Deal, Dealer, Task
from .estimate import STORED_S, Estimator, has_answer, is_stored, remember
from .job import Job, JobResult
from .probe import disagreements
from .result import Done, FleetResult, duration, summary, without_details
from .seat import Device, Report, Seat, SeatGone

POLL_S = 1.0
"""Interval at which new seats are looked for."""
SHOW_S = 15.0
"""Interval at which the remaining time is shown while no job ends."""
STOP_S = 20.0
"""Longest wait for interrupted jobs to keep their measurements."""
CLOSE_S = 15.0
"""Longest wait for the processes of the seats to end."""
MOST_DEATHS = 3
"""Jobs in a row that end with the death of their process before a seat with equals leaves: its device may be broken."""


class Roster(Protocol):
    """Source of seats: the devices of a host, or of a cluster."""

    def joining(self, present: Collection[str]) -> Sequence[Seat]:
        """Return seats that may be opened. ``present`` are the names of the open ones."""

    def ahead(self, tasks: Sequence[Task], device: Device) -> None:
        """Prepare tasks that are dealt soon to such a device."""

    def close(self) -> None:
        """Free what the roster holds."""


@dataclass(frozen=True, slots=True)
class _Event:
    seat: Seat
    what: Device | tuple[Deal, Report] | SeatGone


class Fleet:
    """One run of jobs on the seats of a roster. ``jobs`` run once for each kind of device among the seats.

    Answers are stored in ``store``. With ``keep``, results stay in ``FleetResult``; a large fleet only counts them.
    """

    def __init__(
        self, jobs: Sequence[Job], roster: Roster, store: Store, settings: Settings, progress: Progress, *, keep: bool = True
    ) -> None:
        self._jobs = list(dict.fromkeys(jobs))
        self._roster = roster
        self._store = store
        self._settings = settings
        self._progress = progress
        self._keep = keep
        self._dealer = Dealer()
        self._events: queue.Queue[_Event] = queue.Queue()
        self._inboxes: dict[str, queue.Queue[Deal | None]] = {}
        self._seats: dict[str, Seat] = {}
        self._threads: list[threading.Thread] = []
        self._deaths: dict[str, int] = {}
        self._result = FleetResult()
        self._count = 0
        self._stopping = False
        self._shown: tuple[int, int] | None = None
        self._shown_s = 0.0

    def run(self) -> FleetResult:
        """Run all jobs. An interruption stores what was measured. Raises UnavailableError if no device could be opened."""
        begun = time.monotonic()
        if not self._jobs:
            return self._result
        try:
            while not (self._result.devices and self._dealer.finished):
                self._look_for_seats()
                self._deal()
                self._handle(self._next_event())
                self._give_up_orphans()
        except BaseException:
            with finishing():
                self._stop()
            raise
        finally:
            self._close()
        self._result.dealt_again = self._dealer.dealt_again
        self._result.seconds = time.monotonic() - begun
        self._result.disagreements = disagreements({name: (x.fingerprint, x.limits) for name, x in self._result.devices.items()})
        return self._result

    def _look_for_seats(self) -> None:
        for seat in self._roster.joining(self._seats):
            self._seats[seat.name] = seat
            inbox = self._inboxes[seat.name] = queue.Queue()
            thread = threading.Thread(target=_serve, args=(seat, inbox, self._events), daemon=True, name=f"gemmtune-{seat.name}")
            self._threads.append(thread)
            thread.start()
        if not self._seats and not self._result.devices:
            why = "; ".join(f"{name}: {reason}" for name, reason in self._result.left.items())
            raise UnavailableError(f"fleet: got no device that can be opened ({why}), expected at least one")

    def _give_up_orphans(self) -> None:
        """Let tasks fail whose kind of device has left for good, once nothing else remains."""
        if set(self._seats) != set(self._dealer.seats) or any(map(self._dealer.running_on, self._dealer.seats)):
            return
        for task in self._dealer.orphans():
            self._note(task, "", 0.0, None, "no device of its kind is left")

    def _deal(self) -> None:
        for name in self._dealer.seats:
            if self._dealer.running_on(name) is None and (deal := self._dealer.next(name, time.monotonic())) is not None:
                self._inboxes[name].put(deal)
        for kind in set(self._dealer.seats.values()):
            names = [name for name, of in self._dealer.seats.items() if of == kind]
            self._roster.ahead(self._dealer.upcoming(kind, len(names)), self._result.devices[names[0]])
        now_s, state = time.monotonic(), (self._count, len(self._dealer.seats))
        if state != self._shown or now_s - self._shown_s >= SHOW_S:
            self._shown, self._shown_s = state, now_s
            self._show(now_s)

    def _show(self, now_s: float) -> None:
        running = sum(self._dealer.running_on(name) is not None for name in self._dealer.seats)
        name = f"{counted(len(self._dealer.seats), 'device')}, {running} at work"
        if running:
            name += f", about {duration(self._dealer.remaining_s(now_s))} left"
        self._progress.stage(name, self._count, max(self._total(), 1))

    def _total(self) -> int:
        return len(self._jobs) * max(len({device.fingerprint for device in self._result.devices.values()}), 1)

    def _next_event(self) -> _Event | None:
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=POLL_S)
        return None

    def _handle(self, event: _Event | None) -> None:
        match event:
            case _Event(seat, SeatGone() as gone):
                self._leave(seat, str(gone))
            case _Event(seat, Device() as device):
                self._opened(seat, device)
            case _Event(seat, (Deal() as deal, Report() as report)):
                self._answered(seat, deal, report)

    def _opened(self, seat: Seat, device: Device) -> None:
        if device.fingerprint not in {known.fingerprint for known in self._result.devices.values()}:
            self._dealer.add(tasks_for(self._jobs, device, self._settings, self._store))
        self._result.devices[seat.name] = device
        self._dealer.join(seat.name, device.fingerprint)

    def _answered(self, seat: Seat, deal: Deal, report: Report) -> None:
        reason = self._absorb(seat, report)
        for text in report.messages:
            self._progress.message(f"{seat.name}: {text}")
        self._deaths[seat.name] = self._deaths.get(seat.name, 0) + 1 if report.status == "died" else 0
        match report.status:
            case "died":
                self._lost(deal, report.reason, killed=True)
                kinds = self._dealer.seats
                equals = sum(kind == kinds.get(seat.name) for kind in kinds.values()) > 1
                if self._deaths[seat.name] >= MOST_DEATHS and equals:
                    self._leave(seat, f"its last {MOST_DEATHS} jobs ended with the death of their process: {report.reason}")
            case "done" | "failed":
                if self._dealer.done(deal, report.seconds):
                    failed = reason or report.reason or self._why_not_stored(deal.task, report.result)
                    self._note(deal.task, seat.name, report.seconds, None if failed else report.result, failed)
            case "stopped" if self._stopping:
                self._dealer.lost(deal, killed=False)
            case "stopped":
                self._lost(deal, "its process got SIGTERM", killed=False)

    def _absorb(self, seat: Seat, report: Report) -> str:
        """Store the rows of another machine. Return why they cannot be stored, or ""."""
        if report.rows is None:
            return ""
        try:
            self._store.absorb(*from_json(report.rows, f"rows of {seat.name}"))
        except StoreError as error:
            return str(error)
        return ""

    def _why_not_stored(self, task: Task, result: JobResult | None) -> str:
        """Return why a task's answer cannot be found in the store, or "" if it can, or if there was nothing to try."""
        tried = not isinstance(result, ProblemResult) or bool(result.outcomes)
        if not tried or has_answer(task.job, task.kind, self._settings, self._store):
            return ""
        return f"its results are not in the store {self._store.path}: see that this file can be written, and that the disk has room"

    def _note(self, task: Task, seat: str, seconds: float, result: JobResult | None, reason: str = "") -> None:
        self._count += 1
        where = f"[{self._count}/{self._total()}] {seat}: {task.job}"
        if result is None:
            self._progress.message(f"{where}: failed: {reason}")
        else:
            remember(self._store, task.job, result, task.kind, self._settings.search)
            self._progress.message(f"{where}: {summary(result)} ({duration(seconds)})")
        kept = result if self._keep or result is None else without_details(result)
        self._result.done.append(Done(task=task, seat=seat, seconds=seconds, result=kept, reason=reason))

    def _lost(self, deal: Deal, reason: str, *, killed: bool) -> None:
        if self._dealer.lost(deal, killed=killed):
            self._progress.message(f"{deal.seat}: {deal.task.job}: {reason.splitlines()[0]}; dealt again")
            return
        what = "ended its process" if killed else "lost its device"
        self._note(deal.task, deal.seat, time.monotonic() - deal.begun_s, None, f"{what} again: {reason}")

    def _leave(self, seat: Seat, reason: str) -> None:
        """Remove a seat. What it had in hand is dealt again."""
        self._seats.pop(seat.name, None)
        self._inboxes.pop(seat.name).put(None)
        self._result.left[seat.name] = reason
        self._progress.message(f"{seat.name} leaves the fleet: {reason}")
        deal = self._dealer.leave(seat.name)
        if deal is not None:
            self._lost(deal, reason, killed=False)

    def _stop(self) -> None:
        """Let running jobs keep what they measured, at most STOP_S."""
        deadline = time.monotonic() + STOP_S
        self._stopping = True
        for seat in self._seats.values():
            seat.stop()
        busy = {name for name in self._dealer.seats if self._dealer.running_on(name) is not None}
        while busy and time.monotonic() < deadline:
            event = self._next_event()
            if event is None or isinstance(event.what, Device):
                continue
            busy.discard(event.seat.name)
            if isinstance(event.what, tuple):
                self._answered(event.seat, *event.what)

    def _close(self) -> None:
        """End all seats and their threads."""
        for name, seat in self._seats.items():
            self._inboxes[name].put(None)
            if name not in self._dealer.seats or self._dealer.running_on(name) is not None:
                seat.abort()
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._roster.close()


def _serve(seat: Seat, inbox: queue.Queue[Deal | None], events: queue.Queue[_Event]) -> None:
    """Open a seat and run what is dealt to it, in a thread."""
    try:
        events.put(_Event(seat, seat.open()))
        while (deal := inbox.get()) is not None:
            events.put(_Event(seat, (deal, seat.run(deal.task))))
    except SeatGone as gone:
        events.put(_Event(seat, gone))
    except Exception as error:  # noqa: BLE001 - a seat with an unknown fault must not stop the others
        events.put(_Event(seat, SeatGone(f"{type(error).__name__}: {error}")))
    finally:
        seat.close()


def tasks_for(jobs: Sequence[Job], device: Device, settings: Settings, store: Store) -> list[Task]:
    """Return the tasks of jobs for a kind of device, with their expected durations."""
    estimator = Estimator(device.info, settings, store)
    return [
        Task(
            job=job,
            kind=device.fingerprint,
            expected_s=STORED_S if is_stored(job, device.fingerprint, settings, store) else estimator.seconds(job),
        )
        for job in jobs
    ]
