"""A run as JSON, schema 3::

    schema        3
    gemm          target as given                     device    name, type, sm (compute capability times ten, 0 off CUDA)
    level         smoke, full or exhaustive           versions  name to version
    options       options that were given             declared  every trait with its value
    verdict       CONFORMS, FAILS or NOT TESTED       exit_status  0, 1 or 2
    executed, failed, refused   numbers of cases      seconds, interrupted
    sanitized     case runs under compute-sanitizer that computed something
    sample        null, or cases, of (all cases that there are), seed, not_run (of those cases)
    choices       name of a choice to its number of cases, if the GEMM reports what ran
    properties    a list: name, meaning, verdict, reason, executed, failed, known, refused, cut_short, skipped,
                  error_over_bound
    failures      a list, one for each failed case and property that it violates: case (an id), property, verdict, diagnosis,
                  looks_like, message, choice, index, got, expected, tolerance, bad_elements, elements, tiles, heat, drawn, repeat
                  (a command)
    refusals, not_run   lists, most frequent reason first: reason, count of cases, some of the cases
    known         a list: case, reason                complaints, warnings, notes  texts

JSON has no NaN and no infinities: they are the texts ``nan``, ``inf`` and ``-inf``.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..runs.files import command, json_text
from .summary import FailureGroup, Summary, tile_places, versions

SCHEMA = 3
MOST_EXAMPLES = 5
"""Cases listed for one reason of a refusal or of not being run. Thousands of cases may share it."""
OUTPUTS = ("json", "html", "save_failing")
"""Options that name output files and do not affect the results."""


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the summary as plain values. Infinities and NaN stay floats."""
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
        "sample": {"cases": summary.cases, "of": len(run.everything), "seed": run.options.seed or 0, "not_run": summary.not_run}
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
            "verdict": record.outcome.status if record.outcome else None,
            "choice": record.outcome.choice if record.outcome else "",
            "tiles": {str(tile): places for tile, places in tile_places(failure.index).items()} if failure.index else None,
            "drawn": record.drawn,
            "repeat": command(summary.run.options, [record.case.id], sanitize=record.sanitized),
        }
        for record, failure in group.found
    ]


def as_json_text(summary: Summary) -> str:
    """Return the report as JSON text."""
    return json_text(as_json(summary))
