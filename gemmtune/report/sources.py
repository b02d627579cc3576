"""Files that reports read: stores, their exports, results of ``tune --json`` and of the project's benchmark."""

import dataclasses
import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..choice import Status
from ..errors import StoreError
from ..foreign import parse_json, shown
from ..problem import Problem
from ..selector.machine_limits import DISTURBED_LIMITS, LIMITS
from ..selector.result import HOST_US
from ..store.exchange import MOST_BYTES, check_measured, from_json
from ..store.key import canonical
from ..store.row import Limit, Ranged, Row, number
from ..store.store import Store
from ..store.storefile import HEAD
from ..timing.limits import limit_us
from .entries import Entry
from .known import Known, known_of
from .names import fields_of, machine_text, problem_text

EXPECTED = (
    "expected a store, a file of gemmtune export, one of gemmtune tune or perf-gate with --json, or a result of the project's "
    "benchmark"
)
ANY_DATE = "9999"
PLACE = ("device", "arch", "threads", "timing")
"""Fields of a machine that both sides of a comparison must share. Versions may differ: their effect is what it shows."""
MOST_OTHERS = 8
GZIP = b"\x1f\x8b"
"""First bytes of a compressed file."""
Limits = Mapping[str, Mapping[str, float]]
"""Limits by machine without its timing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Contents of one file."""

    name: str
    entries: tuple[Entry, ...]
    tables: tuple[Ranged, ...] = ()
    limits: Limits = field(default_factory=dict)
    machine: str = ""
    """Machine of all entries as one line, for files that name one."""
    known: tuple[Known, ...] = ()
    """All measured choices of each problem, for stores and their exports."""

    @property
    def machines(self) -> list[str]:
        """Machines of the entries, one text each."""
        named = dict.fromkeys(entry.machine for entry in self.entries)
        return [self.machine] if self.machine else [machine_text(x) for x in named if x]

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the name, and the entries with their gains."""
        entries = [dataclasses.asdict(x) | {"speedup_over_torch": x.speedup, "share_of_limit": x.share} for x in self.entries]
        return {"name": self.name, "machine": self.machine, "problems": entries}


def before_and_after(before: Source, after: Source) -> str:
    """Return the names of both files of a comparison, each with its machines if these differ."""
    apart = before.machines != after.machines
    texts = (", ".join((source.name, *(source.machines if apart else ()))) for source in (before, after))
    return "Before: {}. After: {}.".format(*texts)


def read(path: Path) -> Source:
    """Return the contents of a file. Raises StoreError if it cannot be read, or is none of the files that reports know."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if text.startswith(GZIP):
            with gzip.open(path) as stream:
                text = stream.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}, {EXPECTED}") from error
    if text.startswith(HEAD):
        return of_store(Store.open(path, read_only=True), path.name)
    if len(text) > MOST_BYTES:
        raise StoreError(f"{path}: got more than {MOST_BYTES} bytes, {EXPECTED}")
    try:
        data = parse_json(text.decode())
    except ValueError as error:
        raise StoreError(f"{path}: got no JSON ({error}), {EXPECTED}") from None
    try:
        if isinstance(data, list):
            return Source(name=path.name, entries=tuple(_of_results(data)))
        if isinstance(data, dict) and "shapes" in data and "environment" in data:
            return _of_benchmark(data, path.name)
        if isinstance(data, dict) and "problems" in data and "rule" in data:
            return _of_gate(data, path.name)
        if not isinstance(data, dict) or "measurements" not in data:
            got = f"an object with {', '.join(sorted(data)) or 'nothing'}" if isinstance(data, dict) else shown(data)
            raise StoreError(f"{path}: got {got}, {EXPECTED}")
        rows, limits, ranged = from_json(data, str(path))
        check_measured(rows, limits, ranged, ANY_DATE)
        return _of_rows(rows, ((x.fingerprint, x.name, x.value) for x in limits), ranged, path.name)
    except (KeyError, TypeError, AttributeError):
        raise StoreError(f"{path}: got other JSON, {EXPECTED}") from None
    except StoreError as error:
        raise StoreError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def of_store(store: Store, name: str) -> Source:
    """Return the contents of a store."""
    rows, ranged = store.every_row(), store.every_ranged()
    machines = dict.fromkeys(_with_timing(row.fingerprint, mode) for row in rows for mode in (DISTURBED_LIMITS, LIMITS))
    limits = ((machine, limit, value) for machine in machines for limit, value in store.limits(machine).items())
    return _of_rows(rows, limits, ranged, name)


def _of_rows(rows: Iterable[Row], limits: Iterable[tuple[str, str, float]], ranged: Iterable[Ranged], name: str) -> Source:
    found: dict[str, dict[str, float]] = {}
    quiet: dict[str, set[str]] = {}
    for machine, limit, value in limits:  # the quiet ones come last
        place = _without_timing(machine)
        found.setdefault(place, {})[limit] = value
        if machine != _with_timing(machine, DISTURBED_LIMITS):
            quiet.setdefault(place, set()).add(limit)
    rough = {place for place, values in found.items() if values.keys() - quiet.get(place, set())}
    known = tuple(known_of(rows))
    places = [_without_timing(x.fingerprint) for x in known]
    entries = tuple(_of_known(x, found.get(place, {}), place in rough) for x, place in zip(known, places, strict=True))
    return Source(name=name, entries=entries, tables=tuple(ranged), limits=found, known=known)


def _of_known(known: Known, limits: Mapping[str, float], rough: bool) -> Entry:
    outcomes, fields = known.outcomes, fields_of(known.fingerprint)
    failed = tuple((row.name, str(row.status), row.reason) for row in known.rows if row.status is not Status.OK)
    entry = Entry(
        text=problem_text(known.key),
        key=known.key,
        place=canonical({name: fields.get(name) for name in PLACE}),
        machine=known.fingerprint,
        torch_us=known.torch_us,
        disturbed=known.disturbed,
        limit_rough=rough,
        measured_at=max(row.measured_at for row in known.rows),
        others=tuple((o.name, o.time_us) for o in outcomes[1 : MOST_OTHERS + 1] if o.time_us),
        failures=failed,
    )
    problem = entry.problem
    limit = limit_us(problem, limits) if problem is not None else None
    first = outcomes[0] if outcomes else None
    return dataclasses.replace(
        entry, limit_us=limit, name=first.name if first else None, time_us=first.time_us if first else None
    )  # fmt: skip


def _of_results(data: list[Any]) -> Iterator[Entry]:
    for result in (x for x in data if "table" not in x):
        key = canonical({name: value for name, value in result["problem"].items() if name != "text"})
        choices = result["choices"]
        times = {choice["name"]: choice["time_us"] for choice in choices if choice["time_us"]}
        ordered = sorted((item for item in times.items() if item[0] != result["pick"]), key=lambda item: item[1])
        pick_us, ratio = times.get(result["pick"]), number("speedup_over_torch", result.get("speedup_over_torch"))
        yield Entry(
            text=problem_text(key),
            key=key,
            name=result["pick"],
            time_us=pick_us,
            torch_us=pick_us * ratio if pick_us and ratio else _torch_us(choices),
            limit_us=result.get("limit_us"),
            disturbed=str(result.get("disturbed") or ""),
            seconds=result.get("seconds"),
            others=tuple(ordered[:MOST_OTHERS]),
            failures=tuple((c["name"], c["status"], c["reason"]) for c in choices if c["status"] != Status.OK),
        )


def _torch_us(choices: list[Any]) -> float | None:
    """Return the time of torch's operation without gemmtune's own, as ``Outcome.direct_us`` does. None if it was not measured."""
    found = next((choice for choice in choices if choice.get("baseline") and choice["time_us"]), None)
    if found is None:
        return None
    return max((number("time_us", found["time_us"]) or 0.0) - (number(HOST_US, found["info"].get(HOST_US)) or 0.0), 0.0)


def _of_gate(data: dict[str, Any], name: str) -> Source:
    """Return the contents of a performance gate. It compares with torch's operation."""
    entries = []
    for found in data["problems"]:
        key = canonical({field: value for field, value in found["problem"].items() if field != "text"})
        times = {"time_us": found["candidate_us"], "torch_us": found["reference_us"], "paired": found["ratio"]}
        verdict = f"{found['verdict'] or 'NOT MEASURED'}: {found['reason']}".removesuffix(": ")
        entries.append(Entry(text=problem_text(key), key=key, name=found["candidate"] or None, verdict=verdict, **times))
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    return Source(name=name, entries=tuple(entries), machine=f"{data['device']}, {versions}")


def _of_benchmark(data: dict[str, Any], name: str) -> Source:
    environment = data["environment"]
    versions = ", ".join(f"{package} {version}" for package, version in environment["versions"].items())
    entries = []
    for row in data["shapes"]:
        measured: Any = row["regimes"].get("graph") or next(iter(row["regimes"].values()), None)
        torch = measured["references"].get("torch")
        others = [(x["name"], x["time_us"]) for x in row.get("finalists", ()) if x["name"] != row["pick"] and x["time_us"]]
        entries.append(
            Entry(
                text=row["problem"],
                key=_key_of(row["problem"]),
                name=row["pick"],
                time_us=measured["gemmtune_us"],
                torch_us=torch["time_us"] if torch else None,
                limit_us=row["limit_us"],
                seconds=row["tuning_s"].get("gemmtune"),
                others=tuple(sorted(others, key=lambda x: x[1])[:MOST_OTHERS]),
                failures=tuple((reference, "failed", reason) for reference, reason in row["errors"].items()),
            )
        )
    limits = [Limit(fingerprint="any", name=key, value=x) for key, x in (data.get("limits") or {}).items()]
    check_measured((), limits, (), ANY_DATE)
    found = {"": {limit.name: limit.value for limit in limits}}
    return Source(name=name, entries=tuple(entries), limits=found, machine=f"{environment['device']}, {versions}")


def _key_of(text: str) -> str:
    """Return the key of a plain product of two matrices by its text, "" for any other problem."""
    words = text.split()
    if len(words) != 6 or words[0] != "mm" or words[4] != "on":
        return ""
    try:
        m, n, k = map(int, words[1].split("x"))
        problem = Problem.mm(m, n, k, dtype=words[2], layout=words[3], device_type=words[5])
    except ValueError:
        return ""
    return problem.key if str(problem) == text else ""


def _with_timing(fingerprint: str, timing: str) -> str:
    return canonical(fields_of(fingerprint) | {"timing": timing})


def _without_timing(fingerprint: str) -> str:
    return canonical({name: value for name, value in fields_of(fingerprint).items() if name != "timing"})
