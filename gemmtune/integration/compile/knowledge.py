"""What the store knows of GEMMs in compiled graphs: the times of one, with its tail, and in place of several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import settings as settings_module
from ...choice import Choice, Status
from ...device import DeviceInfo, detect
from ...dispatch.host import host_us
from ...dispatch.ranges import range_plan_for
from ...problem import Problem
from ...selector.candidates import Candidates
from ...selector.progress import Progress
from ...selector.remote import open_session
from ...selector.segments import Table
from ...settings import Settings
from ...store.key import canonical, fingerprint_text, now
from ...store.store import Row, Store, open_store
from ...timing.rounds import TIE
from ..measured import candidates_in_models, in_models, inductor_overlaps, tune_products
from .judging import Taken, Verdict
from .planned_join import gathered_roles
from .variants import BACKEND_NAME, CompiledVariant, JoinedVariant, Variant, Way

APART = 0.05
"""Times of two sessions differ by this for the same kernel: clocks drift between them."""
Compared = tuple[Problem, Problem | None]
"""A GEMM alone, and with the tail that may be fused with it."""
Joined = tuple[Problem, tuple[Compared, ...]]
"""A product of all columns, and those of which it consists: each with its tail, but for one that an earlier one has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What the store knows of GEMMs in compiled graphs, on one machine under some settings."""

    device: DeviceInfo
    settings: Settings
    store: Store
    _found: dict[Problem, Candidates] = field(default_factory=dict)
    """What was read of the store since the last measurement."""

    @classmethod
    def here(cls, device: torch.device) -> Knowledge:
        """What is known under the settings in force."""
        info, settings = detect(device), settings_module.current()
        return cls(device=info, settings=in_models(settings, info), store=open_store(settings))

    def knows(self, problem: Problem) -> bool:
        """There is a stored pick."""
        return self._candidates(problem).picked is not None

    def verdict(self, alone: Problem, fused: Problem | None) -> Verdict:
        """What beats torch's GEMM, or with a tail torch's GEMM and Inductor's kernel, by more than a tie."""
        of_gemm = self._of_gemm(alone)
        if fused is None or self._candidates(alone).picked is None or not (ways := self._open_ways(alone, fused)):
            return self._by_parts(alone, fused) or of_gemm
        times = self._times(fused, ways)
        if "untouched" not in times:
            return dataclasses.replace(of_gemm, reason=f"{of_gemm.reason}; with its tail not compared with Inductor's kernel")
        told = tuple(times.items())
        best = min(times, key=times.__getitem__)
        if best == "untouched" or times[best] > (1 - TIE) * times["untouched"]:
            return Verdict(taken="", reason="torch's GEMM with Inductor's kernel is as fast", times_us=told)
        taken: Taken = "fused" if best == "fused" else "alone"
        return Verdict(taken=taken, reason="faster than torch's GEMM with Inductor's kernel", times_us=told)

    def of_every_m(self, alone: Problem, fused: Problem | None) -> Verdict | None:
        """What the tables say of a product whose M is open: ours, unless torch has all segments; None without a table."""
        ways: tuple[tuple[Problem | None, Taken], ...] = ((fused, "fused"), (alone, "alone"))
        for problem, taken in ways:
            table = self._table(problem) if problem is not None else None
            if table is not None:
                ours = any(not x.name.startswith("aten:") for x in table.segments)
                reason = f"by the table of M = {table.lo}..{table.hi}"
                return Verdict(taken=taken, reason=reason) if ours else Verdict(taken="", reason=f"torch's own is as fast {reason}")
        return None

    def _table(self, problem: Problem) -> Table | None:
        shared = range_plan_for(problem, self.device, self.settings) if self.settings.rows == "shared" else None
        return shared.table if shared is not None else None

    def measure(self, compared: Sequence[Compared], joined: Sequence[Joined] = ()) -> None:
        """Tune GEMMs, then time fused against unfused, and joined against single ones. What is known is not measured again."""
        problems = dict.fromkeys(problem for pair in compared for problem in pair if problem is not None)
        problems |= dict.fromkeys(problem for whole, pairs in joined for problem in (whole, *(alone for alone, _ in pairs)))
        if incomplete := [problem for problem in problems if not self._complete(problem)]:
            tune_products(incomplete, self.device, self.settings, Progress())
            self._found.clear()
        for alone, fused in compared:
            ways = self._open_ways(alone, fused)
            if fused is not None and ways and not self._measured(fused, ways):
                self._rank(fused, ways)
        for whole, pairs in joined:
            both = self._joined_ways(whole, pairs)
            if both and not self._measured(whole, both):
                self._rank(whole, both)
            times = self._times(whole, both) if both else {}
            if len(times) == 2 and times["joined"] < times["apart"]:
                self._rank_tails(pairs)

    def _rank_tails(self, pairs: Sequence[Compared]) -> None:
        """Time tails that are fused against Inductor's kernels, where the parts told enough for a GEMM by itself."""
        for alone, fused in pairs:
            if fused is None or self.verdict(alone, fused).taken != "fused":
                continue
            if not self._measured(fused, ways := self._ways(alone, fused)):
                self._rank(fused, ways)

    def join_verdict(self, whole: Problem, pairs: Sequence[Compared]) -> Verdict:
        """Whether one product beats those of which it consists by more than a tie, and what their fused tails save."""
        ways = self._joined_ways(whole, pairs)
        times = self._times(whole, ways) if ways else {}
        if len(times) < 2:
            return Verdict(taken="", reason="not compared with one product of all columns")
        saved = sum(self._saved_by_tail(*pair) for pair in pairs)
        told = (*times.items(), *([("saved by tails", saved)] if saved else []))
        if times["joined"] + saved > (1 - TIE) * times["apart"]:
            return Verdict(taken="", reason="one product of all columns is no faster", times_us=told)
        return Verdict(taken="joined", reason=f"one product beats {len(pairs)} of the same input", times_us=told)

    def _saved_by_tail(self, alone: Problem, fused: Problem | None) -> float:
        """What a tail costs less where it is fused than as Inductor's kernel; infinite where that was not measured."""
        if fused is None or self.verdict(alone, fused).taken != "fused":
            return 0.0
        times = self._times(fused, self._ways(alone, fused))
        if "untouched" not in times or "fused" not in times:
            return math.inf
        return max(0.0, min(time_us for variant, time_us in times.items() if variant != "fused") - times["fused"])

    def _rank(self, problem: Problem, ways: Sequence[Way]) -> None:
        """Time the ways against each other, and store what was found."""
        with open_session(problem, self.device, self.settings, host_us(self.device, self.settings)) as session:
            ranked = session.rank(ways).times
        measured_at = now()
        rows = [
            Row(
                key=_key(problem),
                fingerprint=fingerprint_text(self.device, self.settings.timing),
                name=way.name,
                backend=BACKEND_NAME,
                content_hash=way.content_hash,
                status=Status.OK if way.name in ranked else Status.RUNTIME_ERROR,
                time_us=ranked[way.name].time_us if way.name in ranked else None,
                finalist=way.name in ranked,
                reason="" if way.name in ranked else "it failed when it was timed; the log of that time says how",
                measured_at=measured_at,
            )
            for way in ways
        ]
        self.store.put(rows)

    def _complete(self, problem: Problem) -> bool:
        """It was measured as products of models are, and nothing of that is missing."""
        found = self._candidates(problem)
        return found.complete and found.settings.timing == self.settings.timing

    def _candidates(self, problem: Problem) -> Candidates:
        found = self._found.get(problem)
        if found is None:
            offered = candidates_in_models(problem, self.device, self.settings, self.store)
            found = self._found[problem] = offered.stored_anyhow(self.store)
        return found

    def _of_gemm(self, problem: Problem) -> Verdict:
        candidates = self._candidates(problem)
        pick = candidates.picked
        if pick is None:
            return self._of_segment(problem) or Verdict(taken="", reason="not tuned")
        if pick.baseline:
            return Verdict(taken="", reason="torch's own is as fast")
        torch_us, ours_us = self._times_of(problem)
        times = tuple((name, time_us) for name, time_us in (("torch", torch_us), ("alone", ours_us)) if time_us is not None)
        return Verdict(taken="alone", reason="faster than torch's own", times_us=times)

    def _of_segment(self, problem: Problem) -> Verdict | None:
        """What the table of every M has for a problem that was not tuned for itself."""
        table = self._table(problem)
        place = table.index(problem.m) if table is not None else None
        if table is None or place is None:
            return None
        segment = table.segments[place]
        taken: Taken = "" if segment.name.startswith("aten:") else "alone"
        return Verdict(taken=taken, reason=f"the table of M = {table.lo}..{table.hi} has {segment.name}")

    def _times_of(self, problem: Problem) -> tuple[float | None, float | None]:
        """The times of torch's operation and of the pick."""
        candidates = self._candidates(problem)
        torch_us = next((o.direct_us for o in candidates.known.values() if o.baseline and o.direct_us), None)
        pick = candidates.picked
        return torch_us, None if pick is None else candidates.known[pick.content_hash].direct_us

    def _by_parts(self, alone: Problem, fused: Problem | None) -> Verdict | None:
        """The fused choice where no comparison is needed: it beats torch's GEMM without the tail, and is no slower than ours."""
        picks = [self._candidates(problem).picked for problem in (alone, fused) if problem is not None]
        if fused is None or any(pick is None or pick.baseline for pick in picks):
            return None
        (torch_us, alone_us), (_, fused_us) = self._times_of(alone), self._times_of(fused)
        if torch_us is None or alone_us is None or fused_us is None:
            return None
        if fused_us > (1 - APART) * torch_us or fused_us > (1 + TIE) * alone_us:
            return None
        times = (("torch alone", torch_us), ("alone", alone_us), ("fused", fused_us))
        return Verdict(taken="fused", reason="with its tail faster than torch's GEMM without it", times_us=times)

    def _open_ways(self, alone: Problem, fused: Problem | None) -> list[CompiledVariant]:
        """The ways that have to be timed against each other; none where there is but one, or the parts tell."""
        if fused is None or self._by_parts(alone, fused) is not None:
            return []
        ways = self._ways(alone, fused)
        return ways if len(ways) > 1 else []

    def _ways(self, alone: Problem, fused: Problem) -> list[CompiledVariant]:
        """The ways that may be worth it: torch's alone where it is the pick with and without the tail."""
        single, whole = self._candidates(alone).picked, self._candidates(fused).picked
        runs: dict[Variant, tuple[Choice, ...]] = {"untouched": ()}
        if single is not None and not single.baseline:
            runs["alone"] = (single,)
        if whole is not None and not whole.baseline:
            runs["fused"] = (whole,)
        overlapping = inductor_overlaps(self.device)
        return [
            CompiledVariant(alone=alone, overlapping=overlapping, **self._words(variant, fused, alone, chosen))
            for variant, chosen in runs.items()
        ]

    def _joined_ways(self, whole: Problem, pairs: Sequence[Compared]) -> list[Way]:
        """One product and several, the latter first; none where something of it was not tuned."""
        parts = tuple(alone for alone, _ in pairs)
        single = [self._candidates(part).picked for part in parts]
        picks: dict[Variant, list[Choice | None]] = {"apart": single, "joined": [self._candidates(whole).picked]}
        widths = "+".join(str(part.n) for part in parts) + (" gathered" if gathered_roles(whole) else "")
        if None in (*picks["apart"], *picks["joined"]):
            return []
        return [
            JoinedVariant(parts=parts, **self._words(variant, whole, whole, chosen, f" {widths}"))
            for variant, chosen in picks.items()
        ]

    def _words(
        self, variant: Variant, problem: Problem, of_claims: Problem, runs: Iterable[Choice | None], behind: str = ""
    ) -> dict[str, Any]:
        """What every way has."""
        claims = next(iter(self._candidates(of_claims).choices.values())).claims
        hashes = tuple(choice.content_hash for choice in runs if choice is not None)
        name = f"{BACKEND_NAME}:{variant}{behind}"
        return {"name": name, "backend": BACKEND_NAME, "problem": problem, "claims": claims, "variant": variant, "runs": hashes}

    def _measured(self, fused: Problem, ways: Iterable[Way]) -> bool:
        """Each of the ways was timed, or failed then."""
        rows = self.store.rows(_key(fused), fingerprint_text(self.device, self.settings.timing))
        return all(way.content_hash in rows for way in ways)

    def _times(self, fused: Problem, ways: Sequence[Way]) -> dict[Variant, float]:
        """The times of these ways that the store has from one measurement, the last that included the first of them."""
        rows = self.store.rows(_key(fused), fingerprint_text(self.device, self.settings.timing))
        found = {way.variant: row for way in ways if (row := rows.get(way.content_hash)) is not None and row.time_us}
        first = ways[0].variant
        begun = found[first].measured_at if first in found else ""
        return {variant: row.time_us for variant, row in found.items() if row.measured_at == begun and row.time_us}


def _key(fused: Problem) -> str:
    """The store's key for ways to compile a problem, which are no choices for a call of it."""
    return canonical(fused.to_json() | {"compiled": "inductor"})
