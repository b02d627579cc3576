"""Expected duration of jobs: from the durations in the store, or else from a formula."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from ..device import DeviceInfo
from ..errors import InvalidProblemError
from ..foreign import parse_json
from ..problem import Problem
from ..selector.candidates import outcome_of
from ..selector.ranges import kind_of
from ..selector.result import ProblemResult
from ..selector.stored_tables import stored_table
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import Ranged, Store
from .job import Job, JobResult

SECONDS = "seconds"
"""Kind of the stored record with the duration of a job."""
STORED_S = 0.5
"""Duration of a job whose answer is in the store."""
MOST_S = 1e6
"""Longest stored duration that is believed."""
SEARCHES = {"quick": 0.5, "default": 1.0, "exhaustive": 10.0}
"""Duration of each ``search`` as a multiple of the default's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Durations of tuning on one type of device: constant, and per TFLOP of the largest product."""

    table_s: float
    problem_s: float
    table_s_per_tflop: float
    problem_s_per_tflop: float

    def seconds(self, job: Job, settings: Settings) -> float:
        """Return the formula's duration of a job."""
        tflop = job.largest.flops / 1e12
        constant, linear = (
            (self.problem_s, self.problem_s_per_tflop) if job.rows is None else (self.table_s, self.table_s_per_tflop)
        )
        return (constant + linear * tflop) * SEARCHES[settings.search]


GPU = Rates(table_s=24.0, problem_s=5.0, table_s_per_tflop=2.0, problem_s_per_tflop=1.0)
"""Durations on a GPU. Source: ``tuning`` of benchmarks/results/nvidia-h200/rows.json and rows-int4.json."""
CPU = Rates(table_s=30.0, problem_s=8.0, table_s_per_tflop=300.0, problem_s_per_tflop=60.0)
"""Durations on a CPU: those of benchmarks/results/cpu-amd-epyc/rows.json, and the C++ compiler's on two cores."""


class Estimator:
    """Expected durations of jobs on one kind of device.

    A job that the store has a duration of takes that. Others take the formula's, times the median ratio of the stored durations to
    the formula's: those of the same operation and dtypes, else all of that kind of device.
    """

    def __init__(self, device: DeviceInfo, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._rates = CPU if device.type == "cpu" else GPU
        self._known: dict[Job, float] = {}
        ratios: dict[str, list[float]] = {}
        for job, seconds in durations(store, fingerprint_text(device, settings.timing), settings.search):
            self._known[job] = seconds
            ratios.setdefault(_family(job), []).append(seconds / self._rates.seconds(job, settings))
        self._ratios = {family: statistics.median(found) for family, found in ratios.items()}
        self._ratio = statistics.median(x for found in ratios.values() for x in found) if ratios else 1.0

    @property
    def source(self) -> str:
        """Words for the source of the durations."""
        return f"from {len(self._known)} durations in the store" if self._known else "by a formula: the store has no durations yet"

    def seconds(self, job: Job) -> float:
        """Return the expected duration of a job."""
        if job in self._known:
            return self._known[job]
        return self._rates.seconds(job, self._settings) * self._ratios.get(_family(job), self._ratio)


def _family(job: Job) -> str:
    p = job.problem
    return f"{p.op} {p.dtype_label} {p.b.dtype} {p.encoding} {job.rows is None}"


def durations(store: Store, fingerprint: str, search: str) -> Iterator[tuple[Job, float]]:
    """Yield the jobs of a kind of device with a stored duration for that search. Damaged records are left out."""
    for fact in store.every_ranged():
        value, seconds = fact.value, fact.value.get("seconds")
        if fact.kind != SECONDS or fact.fingerprint != fingerprint or value.get("search") != search:
            continue
        if not isinstance(seconds, (int, float)) or not 0 < seconds < MOST_S:
            continue
        try:
            rows = None if value.get("lo") is None else range(int(value["lo"]), int(value["hi"]) + 1)
            yield Job(problem=Problem.from_json(parse_json(fact.key)), rows=rows), float(seconds)
        except (InvalidProblemError, KeyError, TypeError, ValueError, AttributeError):
            continue


def remember(store: Store, job: Job, result: JobResult, fingerprint: str, search: str) -> None:
    """Store the duration of a job whose every measurement is new. Others took less than the whole job."""
    parts = (result,) if isinstance(result, ProblemResult) else result.tuned_results
    if result.source != "measured" or not parts or any(o.from_store for part in parts for o in part.outcomes):
        return
    rows = job.rows
    value = {"seconds": round(result.seconds, 2), "search": search}
    value |= {"lo": rows[0], "hi": rows[-1]} if rows is not None else {}
    store.put_ranged(Ranged(key=job.problem.key, fingerprint=fingerprint, kind=SECONDS, value=value))


def is_stored(job: Job, fingerprint: str, settings: Settings, store: Store) -> bool:
    """Return True if the store seems to have a job's answer. Cheap: the choices are not enumerated, which the seat does."""
    if settings.tune == "force" or not has_answer(job, fingerprint, settings, store):
        return False
    outcomes = [outcome_of(row) for row in store.rows(job.problem.key, fingerprint).values()] if job.rows is None else []
    return all(o.settled for o in outcomes)


def has_answer(job: Job, fingerprint: str, settings: Settings, store: Store) -> bool:
    """Return True if the store has rows for a job's problem, or a table for its range."""
    if job.rows is None:
        return job.problem.empty or bool(store.rows(job.problem.key, fingerprint))
    known = stored_table(job.rows_class, fingerprint, store, kind_of(settings))
    return known is not None and known[0].covers(filter(job.rows_class.has, job.rows))
