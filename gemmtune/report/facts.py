"""Numbers that a report states: totals, counts by backend and by reason, and how long tuning took."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from ..foreign import shorter
from .entries import Entry, Pair
from .names import fields_of


def geomean(values: Iterable[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts texts with their numbers by size."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def of_how_many(entries: Sequence[Entry]) -> str:
    """Return of how many problems a mean of speed over torch is, as ``2 of 5``. Return "" if it is of all, or of none."""
    compared = sum(bool(entry.speedup) for entry in entries)
    return "" if compared in (0, len(entries)) else f"{compared} of {len(entries)}"


def totals(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Return the numbers at the head of a report, each with its name."""
    ratios = [entry.speedup for entry in entries if entry.speedup]
    shares = [entry.share for entry in entries if entry.share]
    mean, disturbed = geomean(ratios), sum(bool(entry.disturbed) for entry in entries)
    found = [(str(len(entries)), "problem" if len(entries) == 1 else "problems")]
    if mean is not None:
        few = of_how_many(entries)
        found.append((f"{mean:.2f} ×", "torch's speed, geometric mean" + (f" of {few}" if few else "")))
        found.append((f"{min(ratios):.2f} ×", "the least"))
    unsure = sum(entry.unsure for entry in entries)
    missing = len(entries) - len(ratios) - unsure if ratios else 0
    if unsure:
        found.append((str(unsure), "too disturbed to compare with torch"))
    if missing:
        found.append((str(missing), "without a time to compare"))
    if shares:
        rough = "~" * any(entry.limit_rough for entry in entries if entry.share)
        found.append((f"{rough}{statistics.median(shares):.0%}", "of the machine's limit, median"))
    if disturbed:
        found.append((str(disturbed), "measured on a busy machine"))
    return found


def machines_apart(entries: Iterable[Entry]) -> dict[str, str]:
    """Return for each machine the values that tell it from the others, {} for one machine alone. Keys are fingerprints."""
    machines = {entry.machine: fields_of(entry.machine) for entry in entries if entry.machine}
    if len(machines) < 2:
        return {}
    names = sorted({name for fields in machines.values() for name in fields})
    differing = [name for name in names if len({str(fields.get(name)) for fields in machines.values()}) > 1]
    return {machine: shorter(", ".join(str(fields.get(name)) for name in differing)) for machine, fields in machines.items()}


def by_backend(entries: Iterable[Entry]) -> list[tuple[str, int, float | None, str]]:
    """Return for each backend the number of its picks, their geometric mean of speed over torch, and of how many that is."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.backend, []).append(entry)
    means = {name: geomean(x.speedup for x in group if x.speedup) for name, group in groups.items()}
    found = [(name, len(group), means[name], of_how_many(group)) for name, group in groups.items()]
    return sorted(found, key=lambda row: -row[1])


def by_reason(entries: Iterable[Entry]) -> list[tuple[str, str, int]]:
    """Return (status, reason, number of choices), the most frequent first. Numbers in a reason do not tell reasons apart."""
    counts: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        for _, status, reason in entry.failures:
            line = reason.strip().partition("\n")[0]
            counts[status, shorter(re.sub(r"\d+(\.\d+)?", "#", line))] += 1
    return [(status, reason, count) for (status, reason), count in counts.most_common()]


def sides(pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Return the pairs that became slower, those that became faster, and those that only changed their pick."""
    both = sorted((pair for pair in pairs if pair.ratio), key=lambda pair: -(pair.ratio or 0))
    slower, faster = [pair for pair in both if pair.slower], [pair for pair in both if pair.faster][::-1]
    return slower, faster, [pair for pair in both if pair.differs and not pair.slower and not pair.faster]
