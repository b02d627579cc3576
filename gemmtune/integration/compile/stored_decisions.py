"""Decisions by the store's times of compiled graphs: a GEMM alone, with its epilogue, and horizontally fused."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import settings as settings_module
from ...choice import Choice, Status
from ...device import DeviceInfo, detect
from ...dispatch.host import host_us
from ...dispatch.ranges import range_plan_for
from ...problem import Problem
from ...selector.candidates import Candidates, timings_of
from ...selector.progress import Progress
from ...selector.remote import open_session
from ...selector.result import DISTURBED, busy
from ...selector.segments import Table
from ...settings import Settings
from ...store.key import canonical, fingerprint_text, now
from ...store.store import Row, Store, open_store
from ...timing import neighbours
from ...timing.rounds import TIE, tie
from ..measured import candidates_in_models, in_models, inductor_overlaps, tune_products
from .report import Decision, GemmPair, Taken, WholeAndParts
from .variants import BACKEND_NAME, CompiledVariant, GraphVariant, HorizontalVariant, VariantName

APART = 0.05
"""Fraction by which the times of one kernel differ between two sessions, because clocks drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDecisions:
    """Decisions on the GEMMs of compiled graphs, by the store's times for one machine and its settings."""

    device: DeviceInfo
    settings: Settings
    store: Store
    _found: dict[Problem, Candidates] = field(default_factory=dict)
    """Candidates read from the store since the last measurement."""

    @classmethod
    def here(cls, device: torch.device) -> "StoredDecisions":
        """Return the decisions for a device under the current settings."""
        info, settings = detect(device), settings_module.current()
        return cls(device=info, settings=in_models(settings, info), store=open_store(settings))

    def pick(self, problem: Problem) -> Choice | None:
        """Return the pick of the store. Without a measurement no choices are listed, which takes a tenth of a second."""
        timings = [fingerprint_text(self.device, timing) for timing in timings_of(self.settings)]
        return self._candidates(problem).picked if any(self.store.rows(problem.key, x) for x in timings) else None

    def decide(self, alone: Problem, fused: Problem | None) -> Decision:
        """Return the variant that beats torch's GEMM, followed by Inductor's kernel if it has an epilogue, by more than a tie."""
        of_gemm = self._decide_gemm(alone)
        if fused is None or self._candidates(alone).picked is None or not (variants := self._undecided(alone, fused)):
            return self._decide_by_parts(alone, fused) or of_gemm
        times = self._times(fused, variants)
        if "untouched" not in times:
            return dataclasses.replace(of_gemm, reason=f"{of_gemm.reason}; its epilogue was not compared with Inductor's kernel")
        shown = tuple(times.items())
        best, why = min(times, key=times.__getitem__), self._disturbance(fused, variants)
        if best == "untouched" or times[best] > (1 - tie(why)) * times["untouched"]:
            return Decision(taken="", reason=f"torch's GEMM with Inductor's kernel is as fast{busy(why)}", times_us=shown)
        taken: Taken = "fused" if best == "fused" else "alone"
        return Decision(taken=taken, reason=f"faster than torch's GEMM with Inductor's kernel{busy(why)}", times_us=shown)

    def decide_every_m(self, alone: Problem, fused: Problem | None) -> Decision | None:
        """Return the decision for a dynamic M: ours unless torch has every segment of the table. None without a table."""
        ways: tuple[tuple[Problem | None, Taken], ...] = ((fused, "fused"), (alone, "alone"))
        for problem, taken in ways:
            table = self._table(problem) if problem is not None else None
            if table is not None:
                reason = f"by the table of M = {table.lo}..{table.hi}"
                if all(x.name.startswith("aten:") for x in table.segments):
                    return Decision(taken="", reason=f"torch's own is as fast {reason}")
                return Decision(taken=taken, reason=reason)
        return None

    def _table(self, problem: Problem) -> Table | None:
        shared = range_plan_for(problem, self.device, self.settings) if self.settings.rows == "shared" else None
        return shared.table if shared is not None else None

    def measure(self, compared: Sequence[GemmPair], fusions: Sequence[WholeAndParts] = ()) -> None:
        """Tune GEMMs, then time fused against separate epilogues, and one product against several. Known times are not repeated."""
        # Tune each problem.
        problems = dict.fromkeys(problem for pair in compared for problem in pair if problem is not None)
        problems |= dict.fromkeys(problem for whole, pairs in fusions for problem in (whole, *(alone for alone, _ in pairs)))
        if incomplete := [problem for problem in problems if not self._is_complete(problem)]:
            tune_products(incomplete, self.device, self.settings, Progress())
            self._found.clear()
        # Time the epilogues whose decision the separate times leave open.
        for alone, fused in compared:
            variants = self._undecided(alone, fused)
            if fused is not None and variants:
                self._rank(fused, variants)
        # Time horizontal fusions, then the epilogues that they would have to leave to Inductor.
        for whole, pairs in fusions:
            both = self._horizontal_variants(whole, pairs)
            if not both:
                continue
            self._rank(whole, both)
            times = self._times(whole, both)
            if len(times) == 2 and times["joined"] < times["apart"]:
                self._rank_epilogues(pairs)

    def _rank_epilogues(self, pairs: Sequence[GemmPair]) -> None:
        """Time fused epilogues against Inductor's kernels. Separate times decide for one GEMM, but do not say what fusing saves."""
        for alone, fused in pairs:
            if fused is not None and self.decide(alone, fused).taken == "fused":
                self._rank(fused, self._variants(alone, fused))

    def decide_horizontal(self, whole: Problem, pairs: Sequence[GemmPair]) -> Decision | None:
        """Return ``joined`` if one product beats the separate ones by more than a tie plus the savings of their fused epilogues.

        None if they were never timed against each other.
        """
        variants = self._horizontal_variants(whole, pairs) if (rows := self._rows(whole)) else []
        if not any(variant.content_hash in rows for variant in variants):
            return None
        times = self._times(whole, variants)
        if len(times) < 2:
            return Decision(taken="", reason="not compared with one product of all columns: one of them failed")
        saved = sum(self._saved_by_epilogue(*pair) for pair in pairs)
        shown, why = (*times.items(), *([("saved by epilogues", saved)] if saved else [])), self._disturbance(whole, variants)
        if times["joined"] + saved > (1 - tie(why)) * times["apart"]:
            return Decision(taken="", reason=f"one product of all columns is no faster{busy(why)}", times_us=shown)
        return Decision(taken="joined", reason=f"one product beats {len(pairs)} of the same input{busy(why)}", times_us=shown)

    def _saved_by_epilogue(self, alone: Problem, fused: Problem | None) -> float:
        """Return the µs that a fused epilogue saves over Inductor's kernel. Infinite if it was not measured."""
        if fused is None or self.decide(alone, fused).taken != "fused":
            return 0.0
        times = self._times(fused, self._variants(alone, fused))
        if "untouched" not in times or "fused" not in times:
            return math.inf
        return max(0.0, min(time_us for variant, time_us in times.items() if variant != "fused") - times["fused"])

    def _rank(self, problem: Problem, variants: Sequence[GraphVariant]) -> None:
        """Time the variants against each other, and store their times, unless the store has a time or a failure for each."""
        if all(variant.content_hash in self._rows(problem) for variant in variants):
            return
        with open_session(problem, self.device, self.settings, host_us(self.device, self.settings)) as session:
            ranking = session.rank(variants)
        ranked = ranking.times
        why = neighbours.disturbance(self.device, ranking.seen, min((x.spread for x in ranked.values()), default=0.0))
        key, fingerprint, measured_at = _key(problem), fingerprint_text(self.device, self.settings.timing), now()
        self.store.put(
            Row(
                key=key,
                fingerprint=fingerprint,
                name=variant.name,
                backend=BACKEND_NAME,
                content_hash=variant.content_hash,
                status=Status.OK if variant.name in ranked else Status.RUNTIME_ERROR,
                time_us=ranked[variant.name].time_us if variant.name in ranked else None,
                finalist=variant.name in ranked,
                reason="" if variant.name in ranked else "it failed when it was timed; the log of that time says how",
                info={DISTURBED: why} if why else {},
                measured_at=measured_at,
            )
            for variant in variants
        )

    def _is_complete(self, problem: Problem) -> bool:
        """Return True if every candidate was measured, with the timing mode for models.

        Where a table serves the M, the candidates that the table compared suffice: other weights of the model selected them.
        """
        found = self._candidates(problem)
        if found.settings.timing != self.settings.timing:
            return False
        shared = range_plan_for(problem, self.device, self.settings) if found.picked is not None and not found.complete else None
        return found.complete or (shared is not None and not shared.by_rule and shared.serves(problem.m))

    def _candidates(self, problem: Problem) -> Candidates:
        found = self._found.get(problem)
        if found is None:
            offered = candidates_in_models(problem, self.device, self.settings)
            found = self._found[problem] = offered.stored_anyhow(self.store)
        return found

    def _decide_gemm(self, problem: Problem) -> Decision:
        """Return the decision for a GEMM alone, by its own times or by the table of every M."""
        candidates = self._candidates(problem)
        pick = candidates.picked
        if pick is None:
            return self._decide_by_table(problem) or Decision(taken="", reason="not tuned")
        if pick.baseline:
            return Decision(taken="", reason="torch's own is as fast")
        torch_us, ours_us = self._times_of(problem)
        times = tuple((name, time_us) for name, time_us in (("torch", torch_us), ("alone", ours_us)) if time_us is not None)
        return Decision(taken="alone", reason=f"faster than torch's own{busy(self._disturbed(problem))}", times_us=times)

    def _decide_by_table(self, problem: Problem) -> Decision | None:
        """Return the decision of the table of every M, for a problem that was not tuned itself. None without a table."""
        table = self._table(problem)
        place = table.index(problem.m) if table is not None else None
        if table is None or place is None:
            return None
        segment = table.segments[place]
        taken: Taken = "" if segment.name.startswith("aten:") else "alone"
        return Decision(taken=taken, reason=f"the table of M = {table.lo}..{table.hi} has {segment.name}")

    def _times_of(self, problem: Problem) -> tuple[float | None, float | None]:
        """Return the times of torch's operation and of the pick."""
        candidates = self._candidates(problem)
        torch_us = next((o.direct_us for o in candidates.known.values() if o.baseline and o.direct_us), None)
        pick = candidates.picked
        return torch_us, None if pick is None else candidates.known[pick.content_hash].direct_us

    def _decide_by_parts(self, alone: Problem, fused: Problem | None) -> Decision | None:
        """Return ``fused`` if it beats torch's GEMM without the epilogue and is no slower than ours, which needs no comparison."""
        picks = [self._candidates(problem).picked for problem in (alone, fused) if problem is not None]
        if fused is None or any(pick is None or pick.baseline for pick in picks):
            return None
        (torch_us, alone_us), (_, fused_us) = self._times_of(alone), self._times_of(fused)
        if torch_us is None or alone_us is None or fused_us is None:
            return None
        why = self._disturbed(alone) or self._disturbed(fused)
        if fused_us > (1 - max(APART, tie(why))) * torch_us or fused_us > (1 + TIE) * alone_us:
            return None
        times = (("torch alone", torch_us), ("alone", alone_us), ("fused", fused_us))
        return Decision(taken="fused", reason=f"faster with its epilogue than torch's GEMM without it{busy(why)}", times_us=times)

    def _undecided(self, alone: Problem, fused: Problem | None) -> list[CompiledVariant]:
        """Return the variants to time against each other. None if there is only one, or if the separate times decide."""
        if fused is None or self._decide_by_parts(alone, fused) is not None:
            return []
        variants = self._variants(alone, fused)
        return variants if len(variants) > 1 else []

    def _variants(self, alone: Problem, fused: Problem) -> list[CompiledVariant]:
        """Return the variants that could win. ``untouched`` is the only one if torch is the pick with and without the epilogue."""
        single, whole = self._candidates(alone).picked, self._candidates(fused).picked
        runs: dict[VariantName, tuple[Choice, ...]] = {"untouched": ()}
        if single is not None and not single.baseline:
            runs["alone"] = (single,)
        if whole is not None and not whole.baseline:
            runs["fused"] = (whole,)
        overlapping = inductor_overlaps(self.device)
        return [
            CompiledVariant(alone=alone, overlapping=overlapping, **self._common_fields(variant, fused, alone, chosen))
            for variant, chosen in runs.items()
        ]

    def _horizontal_variants(self, whole: Problem, pairs: Sequence[GemmPair]) -> list[GraphVariant]:
        """Return ``apart`` and ``joined``. Empty if one of the problems was not tuned."""
        parts = tuple(alone for alone, _ in pairs)
        single = [self._candidates(part).picked for part in parts]
        picks: dict[VariantName, list[Choice | None]] = {"apart": single, "joined": [self._candidates(whole).picked]}
        widths = "+".join(str(part.n) for part in parts)
        if None in (*picks["apart"], *picks["joined"]):
            return []
        return [
            HorizontalVariant(parts=parts, **self._common_fields(variant, whole, whole, chosen, f" {widths}"))
            for variant, chosen in picks.items()
        ]

    def _common_fields(
        self, variant: VariantName, problem: Problem, of_claims: Problem, runs: Iterable[Choice | None], behind: str = ""
    ) -> dict[str, Any]:
        """Return the fields that all variants share."""
        claims = next(iter(self._candidates(of_claims).choices.values())).claims
        hashes = tuple(choice.content_hash for choice in runs if choice is not None)
        name = f"{BACKEND_NAME}:{variant}{behind}"
        return {"name": name, "backend": BACKEND_NAME, "problem": problem, "claims": claims, "variant": variant, "runs": hashes}

    def _rows(self, problem: Problem) -> Mapping[str, Row]:
        return self.store.rows(_key(problem), fingerprint_text(self.device, self.settings.timing))

    def _disturbance(self, problem: Problem, variants: Sequence[GraphVariant]) -> str:
        """Return the disturbance of the variants' measurement by other work on the machine; empty if none was seen."""
        rows = self._rows(problem)
        found = (rows[x.content_hash].info.get(DISTURBED) for x in variants if x.content_hash in rows)
        return next((str(why) for why in found if why), "")

    def _disturbed(self, problem: Problem) -> str:
        """Return the disturbance of the pick's measurement, or of torch's."""
        candidates = self._candidates(problem)
        digest = candidates.picked.content_hash if candidates.picked is not None else None
        ordered = sorted(candidates.known.items(), key=lambda item: item[0] != digest)  # the pick first
        return next((o.disturbed for name, o in ordered if (name == digest or o.baseline) and o.disturbed), "")

    def _times(self, fused: Problem, variants: Sequence[GraphVariant]) -> dict[VariantName, float]:
        """Return the variants' stored times from one measurement: the last one that included the first variant."""
        rows = self._rows(fused)
        found = {x.variant: row for x in variants if (row := rows.get(x.content_hash)) is not None and row.time_us}
        first = variants[0].variant
        begun = found[first].measured_at if first in found else ""
        return {variant: row.time_us for variant, row in found.items() if row.measured_at == begun and row.time_us}


def _key(fused: Problem) -> str:
    """Return the store's key for compiled variants of a problem, which differ from the choices for a call."""
    return canonical(fused.to_json() | {"compiled": "inductor"})
