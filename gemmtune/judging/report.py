"""Verdicts as lines of text, as plain values, and as one page of HTML without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import Any

from ..conformance.bench.outcome import Outcome
from ..foreign import visible
from ..timing.rounds import BUSY_MARK
from .verdict import Judgement, Standing, Verdict

MOST_CASES = 5
"""Failing cases that the text lists."""
COLOURS = {Standing.RIGHT: "#1a7f37", Standing.WRONG: "#b42318", Standing.DISHONEST: "#b42318", Standing.NOT_JUDGED: "#6b5b00"}
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
body {{ color: #1c1c1c; background: #fff }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
.verdict {{ display: inline-block; padding: .1rem .6rem; border-radius: .3rem; color: #fff; font-weight: 600 }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse }}
td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }}
td.number, th.number {{ text-align: right; white-space: nowrap }} code {{ overflow-wrap: anywhere }} .noted {{ color: #666 }}
@media (prefers-color-scheme: dark) {{ body {{ color: #eee; background: #161616 }} .noted {{ color: #aaa }} }}
</style></head><body>{body}</body></html>
"""


def why(verdict: Verdict) -> str:
    """Return what the standing of a verdict rests on, in a few words."""
    kinds = list(dict.fromkeys(str(finding.kind) for finding in verdict.findings if finding.dishonest))
    if verdict.values.bad:
        kinds.append(f"fails {len(verdict.values.bad)} of {len(verdict.values.executed)} cases")
    return "; ".join(kinds) or verdict.reason


def lines(judgement: Judgement) -> Iterator[str]:
    """Yield the report. A folder of several GEMMs ends with a line for each."""
    for number, verdict in enumerate(judgement.verdicts):
        if number:
            yield ""
        yield from map(visible, _lines(verdict))
    if len(judgement.verdicts) > 1:
        yield ""
        yield from (visible(_last_line(verdict, named=True)) for verdict in judgement.verdicts)


def _lines(verdict: Verdict) -> Iterator[str]:
    yield f"{verdict.target} on {verdict.device}, judged in {verdict.seconds:.1f} s"
    yield f"  values   {_values(verdict)}"
    for outcome in verdict.values.bad[:MOST_CASES]:
        yield f"           {outcome.case.id}"
        yield f"             {_failure(outcome)}"
    if verdict.calls:
        wrong = sum(len(shape.wrong) for shape in verdict.shapes)
        observed = f"; {verdict.deterministic}" if verdict.deterministic else ""
        yield f"  calls    {verdict.calls} timed with new operands and checked, {wrong} wrong{observed}"
    yield from _speed_lines(verdict)
    if verdict.work:
        yield f"  work     {verdict.work}"
    for number, finding in enumerate(verdict.findings):
        yield f"  {'conduct' if not number else '       '}  {'' if finding.dishonest else 'noted: '}{finding}"
    if verdict.reason:
        yield f"  note     {verdict.reason}"
    yield _last_line(verdict)


def _last_line(verdict: Verdict, *, named: bool = False) -> str:
    because = why(verdict)
    return f"{verdict.target if named else 'verdict'}: {verdict.standing}" + (f": {because}" if because else "")


def _values(verdict: Verdict) -> str:
    values = verdict.values
    refused = f", {values.refused} refused" if values.refused else ""
    if not values.executed:
        return f"not judged: no case ran{refused}"
    return f"{len(values.executed)} cases of the suite ran{refused}, {len(values.bad)} failed"


def _failure(outcome: Outcome) -> str:
    if not outcome.failures:
        return outcome.reason
    first = outcome.failures[0]
    return first.message + (f" ({first.diagnosis})" if first.diagnosis else "")


def _speed_lines(verdict: Verdict) -> Iterator[str]:
    speed = verdict.speed
    if speed is None:
        return
    shapes = f"over {len(speed.shapes)} shapes" if len(speed.shapes) > 1 else "for one shape"
    yield f"  speed    {speed.ratio:.2f}× torch ({speed.low:.2f} to {speed.high:.2f}, 95%) {shapes}"
    if verdict.busy:
        yield f"           measured {BUSY_MARK} ({verdict.busy}): the interval may be wrong"
    for row in speed.shapes:
        limit = f", {100 * row.of_limit:.0f}% of the limit" if row.of_limit else ""
        yield f"           {row.ratio:.2f}× ({row.low:.2f} to {row.high:.2f})  {row.time_us:.1f} µs{limit}  {row.problem}"


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
        "why": why(verdict),
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
                 "high": _finite(row.high), "of_limit": row.of_limit}
                for row in speed.shapes
            ],
        },
        "busy": verdict.busy,
        "work": verdict.work,
        "conduct": [{"kind": str(x.kind), "detail": x.detail, "dishonest": x.dishonest} for x in verdict.findings],
        "note": verdict.reason,
        "seconds": verdict.seconds,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_html(judgement: Judgement) -> str:
    """Return a self-contained page. Text from elsewhere is escaped."""
    several = len(judgement.verdicts) > 1
    body = "".join(_section(verdict, level=judgement.level) for verdict in judgement.verdicts)
    if several:
        rows = "".join(
            f"<tr><td><code>{_text(x.target)}</code></td><td>{_badge(x)}</td><td>{_text(why(x))}</td></tr>"
            for x in judgement.verdicts
        )
        body = f"<h1>{_text(judgement.target)}</h1><div class=wide><table>{rows}</table></div>{body}"
    return PAGE.format(title=_text(f"Verdict on {judgement.target}"), body=body)


def _section(verdict: Verdict, *, level: str) -> str:
    parts = [f"<h1>{_text(verdict.target)}</h1><p>{_badge(verdict)} {_text(why(verdict))}</p>"]
    parts.append(f"<p class=noted>on {_text(verdict.device)}, level {_text(level)}, in {verdict.seconds:.1f} s</p>")
    parts.append(f"<h2>Values</h2><p>{_text(_values(verdict))}.</p>")
    if verdict.values.bad:
        rows = "".join(
            f"<tr><td><code>{_text(x.case.id)}</code></td><td>{_text(_failure(x))}</td></tr>" for x in verdict.values.bad
        )
        parts.append(f"<div class=wide><table><tr><th>case</th><th>error</th></tr>{rows}</table></div>")
    if verdict.calls:
        wrong = [(shape, *found) for shape in verdict.shapes for found in shape.wrong]
        text = f"{verdict.calls} timed calls with new operands were checked, {len(wrong)} were wrong. {verdict.deterministic}"
        parts.append(f"<p>{_text(text)}</p>")
    parts.append(_speed_table(verdict))
    if verdict.work:
        parts.append(f"<h2>Work</h2><p>{_text(verdict.work)}</p>")
    if verdict.findings:
        items = "".join(
            f"<li{'' if x.dishonest else ' class=noted'}>{_text(str(x))}{'' if x.dishonest else ' (noted)'}</li>"
            for x in verdict.findings
        )
        parts.append(f"<h2>Conduct</h2><ul>{items}</ul>")
    return "".join(parts)


def _speed_table(verdict: Verdict) -> str:
    speed = verdict.speed
    if speed is None:
        return ""
    head = "".join(
        f"<th{'' if x == 'shape' else ' class=number'}>{x}</th>" for x in ("shape", "× torch", "from", "to", "µs", "% of limit")
    )
    rows = ""
    for row in speed.shapes:
        numbers = (
            f"{row.ratio:.2f}",
            f"{row.low:.2f}",
            f"{row.high:.2f}",
            f"{row.time_us:.1f}",
            f"{100 * row.of_limit:.0f}" if row.of_limit else "",
        )
        rows += f"<tr><td>{_text(row.problem)}</td>" + "".join(f"<td class=number>{x}</td>" for x in numbers) + "</tr>"
    text = f"{speed.ratio:.2f}× torch, {speed.low:.2f} to {speed.high:.2f} with 95% confidence over shapes such as these."
    text += f" Measured {BUSY_MARK}: {verdict.busy}." if verdict.busy else ""
    return f"<h2>Speed</h2><p>{_text(text)}</p><div class=wide><table><tr>{head}</tr>{rows}</table></div>"


def _badge(verdict: Verdict) -> str:
    return f'<span class=verdict style="background:{COLOURS[verdict.standing]}">{_text(str(verdict.standing))}</span>'


def _text(text: str) -> str:
    return html.escape(visible(text))
