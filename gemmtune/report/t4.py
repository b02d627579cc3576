"""Measurements in T4, a format of auto-tuners: https://github.com/KernelTuner/kernel_tuner, ``schema/T4/1.0.0``."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..choice import Status
from ..selector.result import DISTURBED, HOST_US, MARGIN_US, PLACE, SETTLED
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
    Status.TOO_FAST: "correctness",
    Status.DISHONEST: "correctness",
}
"""Words of T4 for each status. All other failures are ``runtime``."""
_FACTS = frozenset({DISTURBED, HOST_US, MARGIN_US, PLACE, SETTLED})
"""Keys of ``info`` that describe a measurement. A configuration has none of them, so that it is the same in every file."""


def to_t4(rows: Iterable[Row]) -> dict[str, Any]:
    """Return rows as results of T4, with times in milliseconds.

    ``correctness`` is 1 for a choice whose results were compared with the reference and are within the bound, and 0 for any other.
    Readers take times for seconds unless ``metadata`` names their unit. Results with a time stand first, because the package
    ``autotuning_methodology`` refuses a file whose first result has none.
    """
    ordered = sorted(rows, key=lambda row: row.time_us is None)
    return {"schema_version": VERSION, "metadata": {"timeunit": "milliseconds"}, "results": [_result(row) for row in ordered]}


def _result(row: Row) -> dict[str, Any]:
    plain = {name: value for name, value in row.info.items() if isinstance(value, (str, int, float, bool, list))}
    measured: list[dict[str, Any]] = []
    if row.time_us is not None:
        measured.append({"name": "time", "value": row.time_us / 1e3, "unit": "ms"})
    if row.error_over_bound is not None:
        measured.append({"name": "error_over_bound", "value": row.error_over_bound, "unit": ""})
    if row.reason:
        measured.append({"name": "reason", "value": row.reason, "unit": ""})
    if disturbed := plain.get(DISTURBED):
        measured.append({"name": DISTURBED, "value": disturbed, "unit": ""})
    return {
        "timestamp": row.measured_at,
        "configuration": {
            "problem": problem_text(row.key),
            "machine": machine_text(row.fingerprint),
            "choice": row.name,
            "backend": row.backend,
            **{name: value for name, value in plain.items() if name not in _FACTS},
        },
        "objectives": ["time"],
        "times": {"runtimes": [] if row.time_us is None else [row.time_us / 1e3]},
        "invalidity": INVALIDITY.get(row.status, "runtime"),
        "correctness": float(row.status is Status.OK and row.error_over_bound is not None),
        "measurements": measured,
    }
