"""A run as JSON, schema 3::

    schema        1
    gemm          as it was named                     device    name, type, sm (compute capability times ten, 0 off CUDA)
    level         smoke, full or exhaustive           versions  name to version
    options       those that were given               declared  every trait with its value
    verdict       CONFORMS, FAILS or NOT TESTED       exit_status  0, 1 or 2
    executed, failed, refused   cases                 seconds, interrupted
    sanitized     runs of cases under compute-sanitizer that computed something
    sample        null, or cases, of (how many cases there are), seed, not_run (of those cases)
    choices       what ran, where the GEMM says so: name to number of cases
    properties    a list: name, meaning, verdict, reason, executed, failed, known, refused, skipped, error_over_bound
    failures      a list, one for each failed case and property that it violates: case (an id), property, verdict, diagnosis,
                  looks_like, message, choice, index, got, expected, tolerance, bad_elements, elements, tiles, heat, drawn, repeat
                  (a command)
    refusals, not_run   lists: reason, count of cases, and some of the cases, the most frequent reason first
    known         a list: case, reason                complaints, warnings, notes  texts

Numbers that JSON does not have are the texts ``nan``, ``inf`` and ``-inf``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..runs.files import command, json_text
from .summary import FailureGroup, Summary, tile_places, versions

SCHEMA = 3
MOST_EXAMPLES = 5
"""Cases that are named for one reason why they were refused or not run: it may be that of thousands."""
OUTPUTS = ("json", "html", "save_failing")
"""Options that say where results are written, and nothing of them."""


def as_json(summary: Summary) -> dict[str, Any]:
    """The summary as plain values, but for infinities and NaN."""
    run, ground = summary.run, summary.run.ground
    return {
        "schema": SCHEMA,
        "gemm": ground.name,
        "device": {"name": ground.device_name, "type": ground.device_type, "sm": ground.sm},
        "level": run.options.level,
        "versions": versions(),
        "options": {name: value for name, value in run.options.given().items() if name not in OUTPUTS},
        "declared": ground.traits.as_json(),
        "verdict": str(summary.standing),
        "exit_status": summary.exit_status,
        "executed": summary.executed,
        "failed": summary.failed,
        "refused": summary.refused,
        "sanitized": summary.sanitized,
        "sample": {"cases": len(run.cases()), "of": len(run.everything), "seed": run.options.seed or 0, "not_run": summary.not_run}
        if summary.sampled
        else None,
        "choices": summary.choices,
        "seconds": round(summary.seconds, 3),
        "interrupted": summary.interrupted,
        "properties": [
            {"verdict" if name == "standing" else name: value for name, value in dataclasses.asdict(p).items()}
            for p in summary.properties
        ],
        "failures": [failure for group in summary.groups for failure in _failures(summary, group)],
        "refusals": _by_reason((r.outcome.reason, r.case.id) for r in summary.records if r.refused and r.outcome),
        "known": [{"case": r.case.id, "reason": r.known} for r in summary.records if r.known_failure],
        "not_run": _by_reason((r.reason, r.case.id) for r in summary.records if r.outcome is None),
        "complaints": list(summary.complaints),
        "warnings": list(summary.warnings),
        "notes": list(summary.notes),
    }


def _by_reason(cases: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    found: dict[str, list[str]] = {}
    for reason, case in cases:
        found.setdefault(reason, []).append(case)
    by_count = sorted(found.items(), key=lambda item: -len(item[1]))
    return [{"reason": reason, "count": len(ids), "cases": ids[:MOST_EXAMPLES]} for reason, ids in by_count]


def _failures(summary: Summary, group: FailureGroup) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(failure)
        | {
            "case": record.case.id,
            "property": failure.property_name,
            "looks_like": group.looks_like,
            "verdict": record.outcome.verdict if record.outcome else None,
            "choice": record.outcome.choice if record.outcome else "",
            "tiles": {str(tile): places for tile, places in tile_places(failure.index).items()} if failure.index else None,
            "drawn": record.drawn,
            "repeat": command(summary.run.options, [record.case.id], sanitize=record.sanitized),
        }
        for record, failure in group.found
    ]


def as_json_text(summary: Summary) -> str:
    """The report."""
    return json_text(as_json(summary))
