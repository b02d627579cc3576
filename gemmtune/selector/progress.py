"""What tuning tells while it works, and the listeners: silent, lines of the log, a bar on a terminal, two lines for a first call.

Progress goes to standard error, so that the standard output of a program that tunes stays its own.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, TextIO

from ..problem import Problem
from .result import ProblemResult
from .table import pick_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

log = logging.getLogger("gemmtune")


class Progress:
    """A listener of one tuning, which by itself says nothing.

    The calls come from the tuning thread, in this order for each problem: ``begin``, ``stage`` whenever something moved, ``end``.
    ``message`` may come at any time; ``close`` comes last, also after an exception.
    """

    def begin(self, problem: Problem, total_problems: int) -> None:
        """Work on the next problem, one out of ``total_problems``, starts."""

    def stage(self, name: str, done: int, total: int) -> None:
        """``done`` of the ``total`` steps of the stage called ``name``, such as ``compile`` or ``measure``, are done."""

    def end(self, result: ProblemResult) -> None:
        """The problem begun last has its result."""

    def message(self, text: str) -> None:
        """Something that a person who waits wants to know, such as waiting for another process."""

    def close(self) -> None:
        """Nothing more will come. Calling it again does nothing."""


class FirstCall(Progress):
    """One line when a call begins to measure, and one when it knows what to run: it takes seconds, and nobody asked for it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._begun = False

    def stage(self, name: str, done: int, total: int) -> None:  # noqa: ARG002 - that it begins is all that is said
        """``tuning mm 16x4096x4096 float32 nt on cpu …``"""
        if not self._begun:
            self._begun = True
            tell(f"tuning {self._problem}: once, the pick is kept for later calls and processes (tune='never' leaves it to torch)")

    def end(self, result: ProblemResult) -> None:
        """``tuned mm 16x4096x4096 float32 nt on cpu in 4.2 s: cpp:…, 1.83x torch``"""
        speedup = f", {result.speedup_over_torch:.2f}x torch" if result.speedup_over_torch else ""
        tell(f"tuned {result.problem} in {result.seconds:.1f} s: {result.pick}{speedup}")


class Lines(Progress):
    """Log lines for pipes: one when a problem starts and ends, one when a stage starts and ends, and in between at most one every
    ``interval_s`` seconds."""

    def __init__(self, *, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s
        self._count = 0
        self._stage = ""
        self._last_s = 0.0

    def begin(self, problem: Problem, total_problems: int) -> None:
        """``[1/4] mm 16x4096x4096 float32 nt on cpu``"""
        self._count += 1
        self._stage = ""
        log.info("[%d/%d] %s", self._count, total_problems, problem)

    def stage(self, name: str, done: int, total: int) -> None:
        """``  compile: 3/24``"""
        now_s = time.monotonic()
        if name == self._stage and done < total and now_s - self._last_s < self._interval_s:
            return
        self._stage = name
        self._last_s = now_s
        log.info("  %s: %d/%d", name, done, total)

    def end(self, result: ProblemResult) -> None:
        """``  pick: cpp:… , 1.83× torch (12.3 s)``"""
        log.info("  %s (%.1f s)", pick_line(result), result.seconds)

    def message(self, text: str) -> None:
        """The text on a line of its own."""
        log.info("  %s", text)


class Bar(Progress):
    """One moving line on a terminal that names the problem and the stage, and a line that stays for each problem that is done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._count = 0
        self._heading = ""

    def begin(self, problem: Problem, total_problems: int) -> None:
        """The bar names the problem."""
        self._count += 1
        self._heading = f"[{self._count}/{total_problems}] {problem}"
        self.stage("", 0, 1)

    def stage(self, name: str, done: int, total: int) -> None:
        """The bar shows how far the stage is."""
        bar = self._opened()
        if self._task is None:
            self._task = bar.add_task("", total=total)
        bar.update(self._task, completed=done, total=total, description=f"{self._heading} {name}".strip())

    def end(self, result: ProblemResult) -> None:
        """The bar goes, a line with the pick stays."""
        self._opened().console.print(
            f"{self._heading}: {pick_line(result)} ({result.seconds:.1f} s)", markup=False, highlight=False, soft_wrap=True
        )
        self._heading = ""
        self.close()

    def message(self, text: str) -> None:
        """A line above the bar."""
        self._opened().console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Gives the terminal line back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def _opened(self) -> RichProgress:
        if self._bar is None:
            # Here rather than at the top: rich takes longer to import than the rest of this package, and most calls show nothing.
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
    """The listener that suits ``stream`` (None: standard error): a bar on a terminal, else lines of the log."""
    stream = stream or sys.stderr
    return Bar(stream) if stream.isatty() else Lines()


def tell(text: str) -> None:
    """An INFO line of the log; on a terminal where nobody has configured logging, a line on standard error."""
    log.info("%s", text)
    if not log.hasHandlers() and sys.stderr.isatty():
        print(f"gemmtune: {text}", file=sys.stderr, flush=True)
