"""Whether a GEMM of a graph becomes ours: where the store says that this beats torch's GEMM followed by Inductor's own kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ... import settings as settings_module
from ...choice import Choice, Status
from ...device import DeviceInfo, detect
from ...dispatch.host import host_us
from ...dispatch.tuning import tune
from ...problem import Problem
from ...selector.candidates import Candidates, candidates_for
from ...selector.remote import open_session
from ...settings import Settings
from ...store.key import canonical, fingerprint, fingerprint_text, now
from ...store.store import Row, Store, open_store
from ...timing.rounds import TIE
from .joins import Join
from .judging import Taken, Verdict
from .products import Product
from .threads import in_a_thread
from .variants import BACKEND_NAME, CompiledVariant, JoinedVariant, Variant, Way

APART = 0.05
"""Times of two sessions differ by this for the same kernel: clocks drift between them."""


@dataclass(frozen=True, slots=True)
class StoreJudge:
    """Goes by what the store knows. With ``tunes`` a GEMM that it does not know is tuned while the graph compiles."""

    tunes: bool = False

    def prepare(self, products: Iterable[Product], joins: Iterable[Join]) -> None:
        """Tune what the store does not know of a graph, all of it at once: then one problem compiles while another is measured."""
        if not self.tunes:
            return
        asked: dict[torch.device, tuple[dict[Compared, None], dict[Joined, None]]] = {}
        for product in products:
            asked.setdefault(product.gemm.meta["val"].device, ({}, {}))[0][_compared(product)] = None
        for join in joins:
            asked[join.products[0].gemm.meta["val"].device][1][_parts(join)] = None
        for device, (compared, joined) in asked.items():
            in_a_thread(functools.partial(Knowledge.here(device).measure, list(compared), list(joined)))

    def joined(self, join: Join) -> Verdict:
        """One product, where it was measured to beat the single ones, and by more than what a fused tail of these saves."""
        verdict = Knowledge.here(join.products[0].gemm.meta["val"].device).join_verdict(*_parts(join))
        if not verdict.taken:
            return verdict
        times = dict(verdict.times_us)
        saved = sum(_saved_by_tail(self.verdict(product)) for product in join.products)
        if saved and times["joined"] + saved > (1 - TIE) * times["apart"]:
            return Verdict(taken="", reason="apart, with their tails, they are as fast", times_us=verdict.times_us)
        return verdict

    def verdict(self, product: Product) -> Verdict:
        """The fastest of torch's, ours alone and ours with the tail, as far as they were measured."""
        known = Knowledge.here(product.gemm.meta["val"].device)
        verdict = known.verdict(*_compared(product))
        if not verdict.taken and not product.torchs and known.knows(product.alone):
            return Verdict(taken="alone", reason="the stored pick, without the operator's look-up", times_us=verdict.times_us)
        if product.before_reduction:
            return dataclasses.replace(verdict, reason=f"{verdict.reason}; the reduction behind it takes its tail")
        return verdict

    def token(self) -> object:
        """The settings, the machine, the contents of the store and whether this tunes."""
        settings = settings_module.current()
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        machines = [fingerprint(detect(device), settings.timing) for device in devices]
        return repr(settings), canonical(machines), open_store(settings).digest(), self.tunes


Compared = tuple[Problem, Problem | None]
"""A GEMM alone, and with the tail that may be fused with it."""


Joined = tuple[Problem, tuple[Problem, ...]]
"""A product of all columns, and those of which it consists."""


def _parts(join: Join) -> Joined:
    return join.problem, tuple(product.alone for product in join.products)


def _compared(product: Product) -> Compared:
    """Inductor takes the tail into a reduction behind it for nothing: there the GEMMs alone compare."""
    return product.alone, None if product.before_reduction else product.fused


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
        """That of the settings in force."""
        settings = settings_module.current()
        return cls(device=detect(device), settings=settings, store=open_store(settings))

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

    def measure(self, compared: Sequence[Compared], joined: Sequence[Joined] = ()) -> None:
        """Tune GEMMs, then time fused against unfused, and joined against single ones. What is known is not measured again."""
        problems = dict.fromkeys(problem for pair in compared for problem in pair if problem is not None)
        problems |= dict.fromkeys(problem for whole, parts in joined for problem in (whole, *parts))
        if incomplete := [problem for problem in problems if not self._candidates(problem).complete]:
            tune(incomplete, settings=self.settings, progress=False, device=str(self.device.torch_device))
            self._found.clear()
        for alone, fused in compared:
            ways = self._open_ways(alone, fused)
            if fused is not None and ways and not self._measured(fused, ways):
                self._rank(fused, ways)
        for whole, parts in joined:
            both = self._joined_ways(whole, parts)
            if both and not self._measured(whole, both):
                self._rank(whole, both)

    def join_verdict(self, whole: Problem, parts: Sequence[Problem]) -> Verdict:
        """Whether one product beats the parts of which it consists by more than a tie."""
        ways = self._joined_ways(whole, parts)
        times = self._times(whole, ways) if ways else {}
        if len(times) < 2:
            return Verdict(taken="", reason="not compared with one product of all columns")
        told = tuple(times.items())
        if times["joined"] > (1 - TIE) * times["apart"]:
            return Verdict(taken="", reason="one product of all columns is no faster", times_us=told)
        return Verdict(taken="joined", reason=f"one product beats {len(parts)} of the same input", times_us=told)

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

    def _candidates(self, problem: Problem) -> Candidates:
        found = self._found.get(problem)
        if found is None:
            found = self._found[problem] = candidates_for(problem, self.device, self.settings).stored(self.store)
        return found

    def _of_gemm(self, problem: Problem) -> Verdict:
        candidates = self._candidates(problem)
        pick = candidates.picked
        if pick is None:
            return Verdict(taken="", reason="not tuned")
        if pick.baseline:
            return Verdict(taken="", reason="torch's own is as fast")
        torch_us, ours_us = self._times_of(problem)
        times = tuple((name, time_us) for name, time_us in (("torch", torch_us), ("alone", ours_us)) if time_us is not None)
        return Verdict(taken="alone", reason="faster than torch's own", times_us=times)

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
        claims = next(c for c in self._candidates(alone).choices.values()).claims
        return [
            CompiledVariant(
                name=f"{BACKEND_NAME}:{variant}",
                backend=BACKEND_NAME,
                problem=fused,
                claims=claims,
                variant=variant,
                alone=alone,
                runs=tuple(choice.content_hash for choice in chosen),
            )
            for variant, chosen in runs.items()
        ]

    def _joined_ways(self, whole: Problem, parts: Sequence[Problem]) -> list[Way]:
        """One product and several, the latter first; none where something of it was not tuned."""
        single = [self._candidates(part).picked for part in parts]
        picks: dict[Variant, list[Choice | None]] = {"apart": single, "joined": [self._candidates(whole).picked]}
        if None in (*picks["apart"], *picks["joined"]):
            return []
        claims = next(iter(self._candidates(whole).choices.values())).claims
        widths = "+".join(str(part.n) for part in parts)
        return [
            JoinedVariant(
                name=f"{BACKEND_NAME}:{variant} {widths}",
                backend=BACKEND_NAME,
                problem=whole,
                claims=claims,
                variant=variant,
                runs=tuple(choice.content_hash for choice in chosen if choice is not None),
                parts=tuple(parts),
            )
            for variant, chosen in picks.items()
        ]

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


def tune_for_compile(problems: Iterable[Problem]) -> None:
    """Tune problems for compiled graphs.

    Each is tuned with and without its epilogue, and both are timed against torch's GEMM followed by Inductor's kernel.
    """
    asked: dict[str, list[Compared]] = {}
    for problem in problems:
        pair = (problem, None) if problem.epilogue is None else (without_epilogue(problem), problem)
        asked.setdefault(problem.device_type, []).append(pair)
    for device_type, compared in asked.items():
        Knowledge.here(detect(device_type).torch_device).measure(compared)


def _saved_by_tail(verdict: Verdict) -> float:
    """What a GEMM saves because its tail is fused; infinite where that was not measured against Inductor's kernel."""
    times = dict(verdict.times_us)
    if verdict.taken != "fused":
        return 0.0
    return min(times["untouched"], times.get("alone", math.inf)) - times["fused"] if "untouched" in times else math.inf


def without_epilogue(problem: Problem) -> Problem:
    """The product alone, in the dtype that it has by itself."""
    dtype = problem.operation.result_dtype(problem.dtype, epilogue=False)
    return dataclasses.replace(problem, epilogue=None, out=dataclasses.replace(problem.out, dtype=dtype))


def _key(fused: Problem) -> str:
    """The store's key for ways to compile a problem, which are no choices for a call of it."""
    return canonical(fused.to_json() | {"compiled": "inductor"})
