"""Progress reports of tuning on standard error, for listeners: silent, log lines, a bar, or two lines for a first call."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, TextIO

from ..problem import Problem
from .result import ProblemResult, busy
from .table import pick_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

log = logging.getLogger("gemmtune")


class Progress:
    """Listener of one tuning. This base class stays silent.

    The calls come from the tuning thread, in this order for each problem: ``begin``, ``stage`` for every step forward, ``end``.
    ``message`` may come at any time. ``close`` comes last, also after an exception.
    """

    def begin(self, problem: Problem, total_problems: int) -> None:
        """Start the next of ``total_problems`` problems."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Report ``done`` of ``total`` steps in the stage ``name``, such as ``compile`` or ``measure``."""

    def end(self, result: ProblemResult) -> None:
        """Report the result of the current problem."""

    def message(self, text: str) -> None:
        """Show a text that a waiting user needs, such as a wait for another process."""

    def close(self) -> None:
        """End the reports. Further calls have no effect."""


class FirstCall(Progress):
    """Listener that logs one line when a call starts to measure and one with the pick: the user did not ask for the delay."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._begun = False

    def stage(self, name: str, done: int, total: int) -> None:  # noqa: ARG002 - only the start is reported
        """Log ``tuning mm 16x4096x4096 float32 nt on cpu …`` once."""
        if not self._begun:
            self._begun = True
            notify(f"tuning {self._problem}: once, later calls and processes reuse the pick (tune='never' runs torch instead)")

    def end(self, result: ProblemResult) -> None:
        """Log ``tuned mm 16x4096x4096 float32 nt on cpu in 4.2 s: cpp:…, 1.83x torch``."""
        speedup = ""
        if result.picked is not None and result.picked.baseline:
            speedup = ", which is torch's own"
        elif result.speedup_over_torch:
            directly = " called directly" * (result.speedup_over_torch < 1)
            speedup = f", {result.speedup_over_torch:.2f}x torch{directly}{busy(result.disturbed)}"
        partial = f"; partial, {result.partial} (first_call_budget_s)" if result.partial else ""
        notify(f"tuned {result.problem} in {result.seconds:.1f} s: {result.pick}{speedup}{partial}")


class Lines(Progress):
    """Listener that logs lines for pipes: at starts and ends, and at most every ``interval_s`` seconds between."""

    def __init__(self, *, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s
        self._count = 0
        self._stage = ""
        self._last_s = 0.0

    def begin(self, problem: Problem, total_problems: int) -> None:
        """Log ``[1/4] mm 16x4096x4096 float32 nt on cpu``."""
        self._count += 1
        self._stage = ""
        log.info("[%d/%d] %s", self._count, total_problems, problem)

    def stage(self, name: str, done: int, total: int) -> None:
        """Log ``  compile: 3/24``."""
        now_s = time.monotonic()
        if name == self._stage and done < total and now_s - self._last_s < self._interval_s:
            return
        self._stage = name
        self._last_s = now_s
        log.info("  %s: %d/%d", name, done, total)

    def end(self, result: ProblemResult) -> None:
        """Log ``  pick: cpp:… , 1.83× torch (12.3 s)``."""
        log.info("  %s (%.1f s)", pick_line(result), result.seconds)

    def message(self, text: str) -> None:
        log.info("  %s", text)


class Bar(Progress):
    """Listener with one moving line on a terminal for the problem and the stage, and one permanent line for each result."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._count = 0
        self._heading = ""

    def begin(self, problem: Problem, total_problems: int) -> None:
        self._count += 1
        self._heading = f"[{self._count}/{total_problems}] {problem}"
        self.stage("", 0, 1)

    def stage(self, name: str, done: int, total: int) -> None:
        bar, description = self._opened(), f"{self._heading} {name}".strip()
        if self._task is None:
            self._task = bar.add_task(description, total=total)
        bar.update(self._task, completed=done, total=total, description=description)

    def end(self, result: ProblemResult) -> None:
        """Replace the bar with a line that names the pick."""
        self._opened().console.print(
            f"{self._heading}: {pick_line(result)} ({result.seconds:.1f} s)", markup=False, highlight=False, soft_wrap=True
        )
        self._heading = ""
        self.close()

    def message(self, text: str) -> None:
        self._opened().console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def _opened(self) -> RichProgress:
        if self._bar is None:
            # Imported here because rich takes longer to import than the rest of this package, and most calls show nothing.
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
            from rich.table import Column  # noqa: PLC0415

            self._bar = Progress(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
        return self._bar


def progress_for(stream: TextIO | None = None) -> Progress:
    """Return the listener that suits ``stream`` (None: standard error): a bar on a terminal, otherwise log lines."""
    stream = stream or sys.stderr
    return Bar(stream) if on_terminal(stream) else Lines()


def on_terminal(stream: TextIO | None) -> bool:
    """Return True if a stream shows its text on a terminal. Daemons have None as a standard stream, or a closed one."""
    return stream is not None and not stream.closed and stream.isatty()


def notify(text: str) -> None:
    """Log an INFO line. On a terminal without configured logging, print it to standard error."""
    log.info("%s", text)
    if not log.hasHandlers() and on_terminal(sys.stderr):
        print(f"gemmtune: {text}", file=sys.stderr, flush=True)
