"""Verdicts as lines of text, as plain values, and as one page of HTML."""

import math
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from ..conformance.bench.outcome import Outcome
from ..foreign import visible
from ..page import Cell, Table, page
from ..timing.rounds import BUSY_MARK
from ..untrusted.conduct import ADVICE
from .speed import Speed, Timed
from .targets import SOURCES
from .verdict import Judgement, Standing, Verdict

MOST_CASES = 5
"""Failing cases that the text lists."""
INDENT = " " * 11
"""Space before a line that goes on."""
NOTED = "noted: "
"""Begin of a line about conduct that counts against nobody."""
MARKS = {Standing.RIGHT: "good", Standing.WRONG: "bad", Standing.DISHONEST: "bad", Standing.NOT_JUDGED: "soft"}


def lines(judgement: Judgement) -> Iterator[str]:
    """Yield the report. A folder of several GEMMs ends with a line for each.

    Text of a GEMM stays within its paragraph, so that it cannot look like a line of the report.
    """
    for number, verdict in enumerate(judgement.verdicts):
        if number:
            yield ""
        yield from map(_paragraph, _lines(verdict))
    if len(judgement.verdicts) > 1:
        yield ""
        yield from (_paragraph(_last_line(verdict, named=True)) for verdict in judgement.verdicts)


def _paragraph(text: str) -> str:
    return visible(text).replace("\n", f"\n{INDENT}")


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"{verdict.target} on {verdict.device}, judged in {verdict.seconds:.1f} s"
    failing = (line for x in verdict.values.bad[:MOST_CASES] for line in (x.case.id, f"  {_failure(x)}"))
    more = {"values": failing, "speed": map(_of_shape, verdict.speed.shapes if verdict.speed else ())}
    for name, texts in _sections(verdict).items():
        for number, text in enumerate((*texts, *more.get(name, ()))):
            yield f"  {'' if number else name:9}{text}"
    yield _last_line(verdict)


def _sections(verdict: Verdict) -> dict[str, list[str]]:
    """Return the lines of each part of a report, without those of failing cases and of shapes."""
    given = {"declared": verdict.declared, "values": _values(verdict), "calls": _calls(verdict)}
    later = {"work": verdict.work, "unseen": verdict.given_up}
    conduct = [f"{'' if x.dishonest else NOTED}{x}" for x in verdict.findings]
    return {
        **{name: [text] for name, text in given.items() if text}, "speed": [*_speed_lines(verdict)],
        **{name: [text] for name, text in later.items() if text}, "conduct": conduct, "to do": advice(verdict),
        "note": [verdict.reason] * bool(verdict.reason),
    }  # fmt: skip


def _calls(verdict: Verdict) -> str:
    if not verdict.calls:
        return ""
    wrong = sum(len(shape.wrong) for shape in verdict.shapes)
    observed = f"; {verdict.deterministic}" if verdict.deterministic else ""
    return f"{verdict.calls} with new operands, each result checked: {wrong} wrong{observed}"


def _last_line(verdict: Verdict, *, named: bool = False) -> str:
    because = verdict.why
    return f"{verdict.target if named else 'verdict'}: {verdict.standing}" + (f": {because}" if because else "")


def _values(verdict: Verdict) -> str:
    values = verdict.values
    refused = f", {values.refused} refused" if values.refused else ""
    if not values.executed:
        return f"not judged: no case ran{refused}"
    return f"{len(values.executed)} cases of the conformance suite ran{refused}, {len(values.bad)} failed"


def _failure(outcome: Outcome) -> str:
    if not outcome.failures:
        return outcome.reason
    first = outcome.failures[0]
    return first.message + (f" ({first.diagnosis})" if first.diagnosis else "")


def _speed_lines(verdict: Verdict) -> Iterator[str]:
    """Yield the speed over all shapes, and what one has to know about the times."""
    speed = verdict.speed
    if speed is None:
        return
    shapes = f"over {len(speed.shapes)} shapes" if len(speed.shapes) > 1 else "for one shape"
    yield f"{speed.ratio:.2f}× torch ({speed.low:.2f} to {speed.high:.2f}, 95%) {shapes}"
    if verdict.busy:
        yield f"measured {BUSY_MARK} ({verdict.busy}): the interval may be wrong"
    if verdict.values.bad or any(shape.wrong for shape in verdict.shapes):
        yield "some results are wrong: this speed means nothing"
    added = [row.added_us for row in speed.shapes if row.added_us[0]]
    if added:
        low, high, margin = min(added)[0], max(added)[0], max(margin for _, margin in added)
        yield f"times are without the {low:.1f} to {high:.1f} µs (± {margin:.1f}) that the judge adds to a call"


def _of_shape(row: Timed) -> str:
    limit = f", {100 * row.of_limit:.0f}% of this machine's limit" if row.of_limit else ""
    return f"{row.ratio:.2f}× ({row.low:.2f} to {row.high:.2f})  {row.time_us:.1f} µs{limit}  {row.problem}"


def advice(verdict: Verdict) -> list[str]:
    """Return what the author of a GEMM can do about a verdict."""
    found = [ADVICE[x.kind] for x in verdict.findings if x.kind in ADVICE]
    if verdict.values.bad and not verdict.target.partition(":")[0].endswith(SOURCES[1:]):
        case = verdict.values.bad[0].case.id
        found.append(f"See a failing case: gemmtune conformance {verdict.target} --device {verdict.device} --repro {case}")
    return list(dict.fromkeys(found))


def as_json(judgement: Judgement) -> dict[str, Any]:
    """Return a judgement as plain values."""
    return {
        "target": judgement.target,
        "level": judgement.level,
        "exit_status": judgement.exit_status,
        "verdicts": [_plain(verdict) for verdict in judgement.verdicts],
    }


def _plain(verdict: Verdict) -> dict[str, Any]:
    speed, values = verdict.speed, verdict.values
    return {
        "target": verdict.target,
        "device": verdict.device,
        "standing": str(verdict.standing),
        "exit_status": verdict.standing.exit_status,
        "why": verdict.why,
        "declared": verdict.declared,
        "values": {
            "executed": len(values.executed), "refused": values.refused, "failed": len(values.bad),
            "failures": [{"case": x.case.id, "message": _failure(x)} for x in values.bad],
        },
        "calls": {
            "checked": verdict.calls, "deterministic": verdict.deterministic,
            "wrong": [
                {"problem": str(shape.problem), "call": number, "error": trouble.text, "earlier_result": stale}
                for shape in verdict.shapes for number, trouble, stale in shape.wrong
            ],
        },
        "speed": None if speed is None else {
            "ratio": _finite(speed.ratio), "low": _finite(speed.low), "high": _finite(speed.high),
            "shapes": [
                {"problem": row.problem, "time_us": row.time_us, "ratio": _finite(row.ratio), "low": _finite(row.low),
                 "high": _finite(row.high), "of_limit": row.of_limit,
                 "added_us": row.added_us[0], "added_margin_us": row.added_us[1]}
                for row in speed.shapes
            ],
        },
        "busy": verdict.busy,
        "work": verdict.work,
        "given_up": verdict.given_up,
        "conduct": [{"kind": str(x.kind), "detail": x.detail, "dishonest": x.dishonest} for x in verdict.findings],
        "to_do": advice(verdict),
        "note": verdict.reason,
        "seconds": verdict.seconds,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_html(judgement: Judgement) -> str:
    """Return a self-contained page. Text from elsewhere is escaped."""
    parts = [
        Markup('<section><h2><code>{}</code></h2><p><b class="{}">{}</b> {}</p>{}</section>').format(
            visible(verdict.target), MARKS[verdict.standing], str(verdict.standing), visible(verdict.why),
            Markup("").join(_parts(verdict, number, level=judgement.level)),
        )
        for number, verdict in enumerate(judgement.verdicts)
    ]  # fmt: skip
    if len(judgement.verdicts) > 1:
        rows = [(_cell(x.target), _cell(str(x.standing), MARKS[x.standing]), _cell(x.why)) for x in judgement.verdicts]
        parts.insert(0, Table(name="verdicts", columns=("GEMM", "verdict", "why"), rows=rows, filters=("verdict",)).html)
    return page(f"Verdict on {visible(judgement.target)}", *parts)


def _parts(verdict: Verdict, number: int, *, level: str) -> Iterator[Markup]:
    yield _line(f"on {verdict.device}, level {level}, in {verdict.seconds:.1f} s", "soft")
    for name, texts in _sections(verdict).items():
        if texts:
            marks = {text: "soft" if text.startswith(NOTED) else "bad" for text in texts if name == "conduct"}
            said = Markup("").join(_line(text, marks.get(text, "")) for text in texts)
            yield Markup("<h3>{}</h3>{}").format(name.capitalize(), said)
        if name == "values" and verdict.values.bad:
            failed = [(_cell(x.case.id), _cell(_failure(x))) for x in verdict.values.bad]
            yield Table(name=f"cases{number}", columns=("case", "error"), rows=failed).html
        if name == "speed" and verdict.speed is not None:
            yield _table(verdict.speed, number)


def _table(speed: Speed, number: int) -> Markup:
    rows = []
    for x in speed.shapes:
        numbers = [(x.ratio, f"{x.ratio:.2f}"), (x.low, f"{x.low:.2f}"), (x.high, f"{x.high:.2f}"), (x.time_us, f"{x.time_us:.1f}")]
        numbers.append((x.of_limit or 0.0, f"{x.of_limit:.0%}" if x.of_limit else ""))
        rows.append((_cell(x.problem), *(Cell(text=shown, number=value) for value, shown in numbers)))
    columns = ("shape", "× torch", "low (95%)", "high (95%)", "µs", "of this machine's limit")
    return Table(name=f"speed{number}", columns=columns, rows=rows).html


def _line(text: str, mark: str = "") -> Markup:
    return Markup('<p class="{}">{}</p>').format(mark, visible(text))


def _cell(text: str, mark: str = "") -> Cell:
    return Cell(text=visible(text), mark=mark)
