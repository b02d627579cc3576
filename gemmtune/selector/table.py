"""Tuning results as text: the choices of each problem by time, the excluded ones with reasons, and the pick."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..backends.own.choice import NAME as OWN
from ..backends.own.choice import UNDECLARED
from ..choice import Refusal, Status
from ..filters import REGEXES
from ..timing.rounds import BUSY_MARK
from .result import AGAIN, ProblemResult, busy
from .text_table import NAMES, TextTable, counted, plain_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .result import Outcome, ProblemResult

DEFAULT_ROWS = 12
"""Timed choices shown for a problem. The torch baseline is always shown."""
REASON_CHARS = 160
REASONS = 3
"""Number of reasons shown for the choices that a backend refused, the most frequent first."""


def render(result: Sequence[ProblemResult], *, max_rows: int | None = DEFAULT_ROWS, width: int | None = None) -> str:
    """Return the results as plain text, ``max_rows`` timed choices each (None: all), folded at ``width`` columns (None: never)."""
    return plain_text(renderables(result, max_rows=max_rows), width)


def renderables(result: Sequence[ProblemResult], *, max_rows: int | None = DEFAULT_ROWS) -> Iterator[RenderableType]:
    """Yield the results as parts that a rich console prints."""
    # rich takes longer to import than this package, so it is imported only for printing.
    from rich.text import Text  # noqa: PLC0415

    for i, problem in enumerate(result):
        if i:
            yield Text("")
        yield Text(heading(problem), style="bold")
        if any(_timed(problem)):
            yield _choices_table(problem, max_rows)
        hidden = len(_timed(problem)) - len(_shown(problem, max_rows))
        slower = [f"… and {counted(hidden, 'slower choice')}"] if hidden else []
        yield from (Text(line, style="dim") for line in (*slower, *left_out_lines(problem)))
        yield from (Text(line, style="yellow") for line in busy_lines(problem))
        if problem.partial:
            yield Text(f"partial: {problem.partial}; tune it again to go on", style="yellow")
        yield Text(pick_line(problem), style="bold green" if problem.pick else "bold red")
    if len(result) > 1:
        yield Text("")
        yield Text(summary_line(result), style="bold")


def busy_lines(result: ProblemResult) -> list[str]:
    """Return a line for each kind of disturbance of a result, with the choices and limits that it concerns."""
    by_reason: dict[str, list[str]] = {}
    for outcome, _ in _timed(result):
        if outcome.disturbed:
            by_reason.setdefault(outcome.disturbed, []).append(outcome.name)
    whole = len(_timed(result))
    lines = [
        f"{'all times' if len(names) == whole else ', '.join(names)}: measured {BUSY_MARK} ({reason}): {AGAIN}"
        for reason, names in by_reason.items()
    ]
    if result.limit_disturbed and whole:
        lines.append(f"% limit: the limits of this machine were measured {BUSY_MARK}. A later tuning measures them again")
    return lines


def heading(result: ProblemResult) -> str:
    """Return a line such as ``mm 16x4096x4096 float32 nt on cpu: 23 choices tried in 4.1 s``."""
    if result.problem.empty:
        return f"{result.problem}: an empty result, nothing to run"
    measured = sum(1 for o in result.outcomes if not o.from_store)
    if result.source == "store":
        return f"{result.problem}: {'from the store' if result.outcomes else 'not tuned'}"
    known = f", {len(result.outcomes) - measured} known from the store" if measured < len(result.outcomes) else ""
    return f"{result.problem}: {counted(measured, 'choice')} tried in {result.seconds:.1f} s{known}"


def pick_line(result: ProblemResult) -> str:
    """Return a line such as ``pick: cpp:avx512_12x32, 67.2 µs, 1.83× torch (aten:mm 123 µs)``."""
    picked, baseline = result.picked, result.baseline
    if result.problem.empty:
        return "pick: none needed"
    if picked is None:
        return f"pick: {result.pick}" if result.pick else "pick: none, every choice was left out"
    text, mark = f"pick: {picked.name}", busy(result.disturbed)
    if picked.time_us is not None:
        text += f", {_number(picked.time_us)} µs"
    if baseline is None or picked.time_us is None:
        return f"{text}{mark}; torch was not measured"
    if result.speedup_over_torch is None:
        return f"{text}; too disturbed to compare with {baseline.name}, {_number(baseline.direct_us or 0.0)} µs{mark}"
    ratio = f"{result.speedup_over_torch:.2f}"
    by_gemmtune = (baseline.time_us or 0.0) / (picked.time_us or 1.0)
    directly = f" called directly, without gemmtune's {_number(baseline.host_us)} µs" if ratio != f"{by_gemmtune:.2f}" else ""
    return f"{text}, {ratio}× torch ({baseline.name} {_number(baseline.direct_us or 0.0)} µs{directly}){mark}"


def summary_line(result: Sequence[ProblemResult]) -> str:
    """Return the number of problems, their total time, and the geometric mean, least and most of the speed-ups over torch."""
    speedups = [s for s in (p.speedup_over_torch for p in result) if s]
    stored = sum(1 for p in result if p.source == "store")
    took = f"{sum(p.seconds for p in result):.1f} s"
    text = f"{counted(len(result), 'problem')} in {took}" + (f", {stored} of them from the store" if stored else "")
    if speedups:
        mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
        few = "" if len(speedups) == len(result) else f" of {len(speedups)} of {counted(len(result), 'problem')}"
        text += f"; over torch: geometric mean{few} {mean:.2f}×, least {min(speedups):.2f}×, most {max(speedups):.2f}×"
    disturbed = [p for p in result if p.disturbed]
    unsure = sum(1 for p in disturbed if p.picked and p.baseline and p.speedup_over_torch is None)
    missing = len(result) - len(speedups) - unsure if speedups else 0
    text += f"; {unsure} too disturbed to compare with torch" if unsure else ""
    text += f"; {missing} without a time to compare" if missing else ""
    return text + (f"; {len(disturbed)} of {len(result)} {BUSY_MARK}" if disturbed else "")


def left_out_lines(result: ProblemResult) -> list[str]:
    """Return lines for the excluded choices: per backend and reason, regardless of numbers, or alone if a regex excluded them."""
    if result.problem.empty:
        return []
    failed = [(o.status.value, o.name, o.reason) for o in result.outcomes if o.status is not Status.OK]
    count = len(failed) + sum(r.count for r in result.refusals)
    settings = tuple(f"{name} " for row in REGEXES for name in (row.allow, row.deny))
    unwanted = [(Status.REFUSED.value, r.name, r.reason) for r in result.refusals if r.reason.startswith(settings)]
    others = [r for r in result.refusals if not r.reason.startswith(settings)]
    return [f"left out: {counted(count, 'choice')}", *_grouped((*failed, *unwanted)), *_folded(others)] if count else []


def refusal_lines(refusals: Iterable[Refusal]) -> list[str]:
    """Return lines for refusals alone, grouped in the same way."""
    return list(_grouped(("", refusal.name, refusal.reason) for refusal in refusals))


def _folded(refusals: Iterable[Refusal]) -> Iterator[str]:
    """Yield lines such as ``  refused: cutlass: 2664 choices: stores f32 (1572); a is t, expected n (640); and 3 more reasons``."""
    by_backend: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        by_backend.setdefault(_group_name(refusal.name), []).append(refusal)
    for backend, refused in by_backend.items():
        if len(refused) == 1:
            yield f"  {Status.REFUSED.value}: {refused[0].name}: {short_reason(refused[0].reason)}"
            continue
        counts: Counter[str] = Counter()
        shown: dict[str, str] = {}
        for refusal in refused:
            kind = _numbers_aside(refusal.reason, refusal.name)
            counts[kind] += refusal.count
            shown.setdefault(kind, short_reason(refusal.reason))
        parts = [f"{shown[kind]} ({count})" for kind, count in counts.most_common(REASONS)]
        if len(counts) > REASONS:
            parts.append(f"and {counted(len(counts) - REASONS, 'more reason')}")
        yield f"  {Status.REFUSED.value}: {backend}: {counted(counts.total(), 'choice')}: {'; '.join(parts)}"


def _group_name(name: str) -> str:
    """Return the name that groups a choice: its backend, or for a user's own kernel its full name, which the user knows."""
    backend = name.partition(":")[0]
    return name if backend == OWN else backend


def _numbers_aside(reason: str, name: str) -> str:
    return re.sub(r"\d+", "#", short_reason(reason).replace(name, ""))


def _grouped(left_out: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a line for each status (empty for refusals), backend and kind of reason, with the first name and reason of it."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for status, name, reason in left_out:
        groups.setdefault((status, _group_name(name), _numbers_aside(reason, name)), []).append((name, short_reason(reason)))
    for (status, backend, _), members in groups.items():
        name, reason = members[0]
        head = f"{status}: " if status else ""
        many = f"{len(members)} × {backend}, for instance " if len(members) > 1 else ""
        yield f"  {head}{many}{name}: {reason}"


def _timed(result: ProblemResult) -> list[tuple[Outcome, float]]:
    """Return the correct and measured choices, the fastest first. Finalists precede dropped choices with rough times."""
    timed = [(o, o.time_us) for o in result.outcomes if o.status is Status.OK and o.time_us is not None]
    return sorted(timed, key=lambda pair: (not pair[0].finalist, pair[1]))


def _shown(result: ProblemResult, max_rows: int | None) -> Sequence[tuple[Outcome, float]]:
    timed = _timed(result)
    if max_rows is None or len(timed) <= max_rows:
        return timed
    return [pair for i, pair in enumerate(timed) if i < max_rows or pair[0].baseline or pair[0].name == result.pick]


def _choices_table(result: ProblemResult, max_rows: int | None) -> TextTable:
    from rich.text import Text  # noqa: PLC0415 - see renderables

    table = TextTable(
        texts=(NAMES, "backend"),
        numbers=("time µs", "GFLOP/s", "% best", "% limit", "verified"),
        last="note",
        optional=("backend", "GFLOP/s", "% limit", "verified"),
    )
    best_us = _timed(result)[0][1]
    alike = len({outcome.disturbed for outcome, _ in _timed(result)}) == 1  # a line below says it of all times
    for outcome, time_us in _shown(result, max_rows):
        # Too slow for the final rounds that took place: its time is from a shorter measurement.
        dropped = not outcome.finalist and any(o.finalist for o in result.outcomes)
        notes = {
            "pick": outcome.name == result.pick,
            "torch": outcome.baseline,
            "dropped": dropped,
            UNDECLARED: bool(outcome.info.get(UNDECLARED)),
            BUSY_MARK: bool(outcome.disturbed) and not alike,
        }
        cells = (
            outcome.name,
            outcome.backend,
            "~" * dropped + _number(time_us),
            _number(result.problem.flops / time_us / 1e3),
            f"{100 * best_us / time_us:.1f}",
            f"{'~' * result.limit_disturbed}{100 * result.limit_us / time_us:.1f}" if result.limit_us else "–",
            "–" if outcome.error_over_bound is None else f"{outcome.error_over_bound:.3f}",
            ", ".join(note for note, holds in notes.items() if holds),
        )
        table.add_row(*map(Text, cells), style="green" if outcome.name == result.pick else None)
    return table


def short_reason(reason: str) -> str:
    """Return one line of a reason: the first line, and the first error line or the last line of what the first announces."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason given"]
    detail = next(
        (line for line in lines[1:] if "error" in line.lower()), lines[-1] if lines[0].endswith(":") and lines[1:] else None
    )
    text = f"{lines[0]} {detail}" if detail else lines[0]
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"


def _number(value: float) -> str:
    """Format with about four significant digits and no exponent: ``6.18``, ``123.4``, ``12340``."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


class TuningResult(tuple[ProblemResult, ...]):
    """The results of one tuning run, one for each problem in the order of the request. Prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return render(self)

    def to_json(self) -> list[dict[str, Any]]:
        return [p.to_json() for p in self]
