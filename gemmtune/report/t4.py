"""Measurements in T4, a format of auto-tuners: https://github.com/KernelTuner/kernel_tuner, ``schema/T4/1.0.0``."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..choice import Status
from ..store.row import Row
from .names import machine_text, problem_text

VERSION = "1.0.0"
INVALIDITY: Mapping[Status, str] = {
    Status.OK: "correct",
    Status.REFUSED: "constraints",
    Status.COMPILE_ERROR: "compile",
    Status.COMPILE_TIMEOUT: "timeout",
    Status.TIMED_OUT: "timeout",
    Status.WRONG_RESULT: "correctness",
}
"""Words of T4 for each status. All other failures are ``runtime``."""


def to_t4(rows: Iterable[Row]) -> dict[str, Any]:
    """Return rows as results of T4.

    ``correctness`` is 1 for a choice whose results were compared with the reference and are within the bound, and 0 for any other.
    Times are in milliseconds.
    """
    return {"schema_version": VERSION, "results": [_result(row) for row in rows]}


def _result(row: Row) -> dict[str, Any]:
    info = {name: value for name, value in row.info.items() if isinstance(value, (str, int, float, bool, list))}
    measured: list[dict[str, Any]] = []
    if row.time_us is not None:
        measured.append({"name": "time", "value": row.time_us / 1e3, "unit": "ms"})
    if row.error_over_bound is not None:
        measured.append({"name": "error_over_bound", "value": row.error_over_bound, "unit": ""})
    if row.reason:
        measured.append({"name": "reason", "value": row.reason, "unit": ""})
    return {
        "timestamp": row.measured_at,
        "configuration": {
            "problem": problem_text(row.key),
            "machine": machine_text(row.fingerprint),
            "choice": row.name,
            "backend": row.backend,
            **info,
        },
        "objectives": ["time"],
        "times": {"runtimes": [] if row.time_us is None else [row.time_us / 1e3]},
        "invalidity": INVALIDITY.get(row.status, "runtime"),
        "correctness": float(row.status is Status.OK),
        "measurements": measured,
    }
