"""Default tables of float weights on a CPU: a rule names a kernel or two for each M, and short rounds here decide against torch.

How fast torch is depends on the CPU, its number of threads and the library that torch was built with. So a gain is never assumed.
One compiled kernel serves all weights of a dtype. It is verified, then both take turns at few Ms with fewer columns of the weight,
as many as show the speed of the whole: that takes some tenths of a second for a weight of any size.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..choice import Choice, Status
from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rows import RowClass, with_columns
from ..store.store import Ranged, Store
from ..timing.rounds import Ranked
from .predicted import baseline_of, offered_by
from .proof import legal_runs
from .range_work import Work, segment_of, with_kernels
from .remote import open_session
from .samples import Ranking, Sample
from .segments import DEFAULT, Segment, Table, merged

log = logging.getLogger("gemmtune")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_NUMBERS = 2**16
"""Numbers in the smallest weight that is timed. The call of a smaller one takes as long as its product."""
ROWS = (1, 4, 16, 64, 256)
"""Last M of each interval, where its choice is timed. A gain at few rows falls with M, so it is least there."""
LAST = 8192
"""Last M of the table, served like the last of ROWS if the gain there is at least MORE_GAIN."""
LEAST_GAIN, MORE_GAIN = 0.05, 0.15
"""Least gain over torch that counts, and the least at the last of ROWS for the Ms above it."""
FEW_ROWS = 64
"""Largest M at which choices of all modes compete, and not only the mode that won at the M before."""
PROVED_ROWS, PROVED_COLUMNS = 96, 300
"""Largest sizes at which choices are verified. They have several tiles in each direction, some of them partial."""
ROUNDS_S = 0.02
NUMBERS, COLUMNS_OF_A_THREAD = 2**22, 128
"""Numbers of the part of a weight that is timed, and the least columns for each thread."""
BUDGET_S = 3.0
"""Time for all weights of a model. Torch runs those that were not begun by then, until a later process times them."""


def is_timed(problem: Problem) -> bool:
    """Return True if default tables of such weights are timed."""
    plain = problem.op in ("mm", "addmm") and problem.device_type == "cpu" and not problem.batched and problem.sparsity is None
    return plain and problem.dtype in DTYPES and problem.b.dtype == problem.dtype and problem.n * problem.k >= LEAST_NUMBERS


@dataclass(frozen=True, slots=True)
class Timed:
    """Default table of one class that is not yet timed."""

    work: Work
    origin: str
    ends: float
    """Time of ``time.monotonic`` after which no timing begins."""

    def kernels(self) -> list[Choice]:
        """Return the choices that need kernels."""
        return [choice for m in self._rows for choice in self._contenders(m)[1:]]

    @property
    def _rows(self) -> list[int]:
        return [m for m in ROWS if self.work.rows_class.has(m)]

    def _contenders(self, m: int) -> list[Choice]:
        """Return torch's operation and the first choice of each of two modes of one compiled kernel. Empty without any of these."""
        problem = self.work.rows_class.at(m)
        offered, baseline = offered_by("cpp", self.work, problem), baseline_of(self.work, problem)
        if not offered or baseline is None:
            return []
        modes: dict[object, Choice] = {}
        for choice in offered:
            if choice.compile_key == offered[0].compile_key:
                modes.setdefault(choice.info["mode"], choice)
        return [baseline, *list(modes.values())[:2]]

    def stored(self, store: Store) -> Table | None:
        """Time the choices and store the table, also one that has torch alone. None without choices, compilers or time."""
        if time.monotonic() > self.ends or not any(choice.compiled for choice in self.kernels()):
            return None
        table, work = self._table(), self.work
        store.put_ranged(Ranged(key=work.rows_class.key, fingerprint=work.fingerprint, kind=DEFAULT, value=table.to_json()))
        return table

    def _table(self) -> Table:
        fastest, disturbed = self._fastest()
        wrong = self._wrong(fastest)
        found = list[Segment]()
        for rows, choice in fastest.items():
            found += self._served(choice if choice.name not in wrong else self._baseline(rows[0]), rows)
        return Table(segments=merged(found), origin=self.origin, disturbed=disturbed)

    def _baseline(self, m: int) -> Choice:
        return self._contenders(m)[0]

    def _fastest(self) -> tuple[dict[range, Choice], str]:
        """Return the choice of each interval, and how other work disturbed the timing."""
        part, device, found, disturbed = _part_of(self.work.rows_class, self.work.device), self.work.device, {}, ""
        before, lo, gain = "", 1, 0.0
        with open_session(part.at(self._rows[-1]), device, self.work.settings) as session:
            for m in self._rows:
                baseline, *ours = self._contenders(m)
                if m > FEW_ROWS:  # torch's gain only grows with M
                    ours = [x for x in ours if x.info["mode"] == before]
                timed = [x for x in (choice.at(part.at(m), device) for choice in (baseline, *ours)) if isinstance(x, Choice)]
                ranking = session.rank(timed, ROUNDS_S) if len(timed) > 1 else Ranking(times={})
                torchs = next((ranking.times[x.name] for x in timed if x.baseline and x.name in ranking.times), None)
                gains = {x: gain_over(torchs, ranking.times[x.name]) for x in ours if torchs and x.name in ranking.times}
                best = max(gains, key=lambda x: gains[x] or 0.0, default=baseline)
                gain = gains.get(best) or 0.0
                if None in gains.values():
                    disturbed = f"too few undisturbed samples at M = {m}"
                found[range(lo, m + 1)] = best if gain else baseline
                before, lo = str(best.info["mode"]) if gain else "", m + 1
        found[range(lo, LAST + 1)] = best if gain >= MORE_GAIN else self._baseline(m)
        return found, disturbed

    def _wrong(self, fastest: Mapping[range, Choice]) -> dict[str, str]:
        """Return the choices that are wrong at an end of their intervals, with the reason."""
        narrow, device, wrong = _narrow(self.work.rows_class), self.work.device, dict[str, str]()
        with open_session(narrow.at(PROVED_ROWS), device, self.work.settings) as session:
            for rows, choice in fastest.items():
                for m in () if choice.baseline else _proved_rows(rows):
                    at = choice.at(narrow.at(m), device)
                    sample = Sample(status=Status.REFUSED, reason=at) if isinstance(at, str) else session.prove_rows(at)
                    if sample.status is not Status.OK:
                        wrong[choice.name] = f"M = {m}: {sample.status}: {sample.reason}"
        for name, reason in wrong.items():
            log.warning("%s: excluding %s, which fails for %s", self.work.rows_class, name, reason)
        return wrong

    def _served(self, choice: Choice, rows: range) -> list[Segment]:
        """Return the segments of a choice for the Ms of an interval. Torch serves those where it is not legal."""
        work, found = self.work, list[Segment]()
        here = min(rows[-1], self._rows[-1])
        name, torchs = (work.take(here, x) for x in (choice, self._baseline(here)))
        for run, reason in legal_runs(work.choices[name], rows, work.rows_class, work.device):
            segment = segment_of(work, name if reason is None else torchs, run[0], run[-1])
            checked = () if work.choices[segment.name].baseline else tuple(m for m in _proved_rows(rows) if m in run)
            found.append(dataclasses.replace(with_kernels(work, segment), checked=checked))
        return found


def gain_over(torchs: Ranked, ours: Ranked) -> float | None:
    """Return the gain over torch's time, zero if it is too small to leave torch, None if samples cannot tell."""
    gain = torchs.time_us / ours.time_us - 1
    if gain < LEAST_GAIN:
        return 0.0
    return gain if torchs.margin_us + ours.margin_us < torchs.time_us - ours.time_us else None


def _proved_rows(rows: range) -> list[int]:
    """Return the ends of an interval at which its choice is verified."""
    return sorted({min(m, PROVED_ROWS) for m in (rows[0], rows[-1]) if rows[0] <= PROVED_ROWS})


@functools.lru_cache(maxsize=256)
def _part_of(rows_class: RowClass, device: DeviceInfo) -> RowClass:
    """Return the class with the columns that are timed."""
    return _narrow(rows_class, max(NUMBERS // rows_class.problem.k, COLUMNS_OF_A_THREAD * max(device.threads, 1)))


def _narrow(rows_class: RowClass, columns: int = PROVED_COLUMNS) -> RowClass:
    """Return the class with the first columns of its weight."""
    return rows_class if columns >= rows_class.problem.n else RowClass(problem=with_columns(rows_class.problem, columns))


def contended(classes: Iterable[RowClass]) -> list[RowClass]:
    """Return the classes whose default tables are timed, the largest weights first: they take most of a model's time."""
    return sorted((x for x in classes if is_timed(x.problem)), key=lambda x: -x.problem.n * x.problem.k)
