"""Whether a GEMM of a graph becomes ours: where the store says that this beats torch's GEMM followed by Inductor's own kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

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
from .judging import Verdict
from .products import Product
from .threads import in_a_thread
from .variants import BACKEND_NAME, CompiledVariant, Variant


@dataclass(frozen=True, slots=True)
class StoreJudge:
    """Goes by what the store knows. With ``tunes`` a GEMM that it does not know is tuned while the graph compiles."""

    tunes: bool = False

    def verdict(self, product: Product) -> Verdict:
        """The fastest of torch's, ours alone and ours with the tail, as far as they were measured."""
        known = Knowledge.here(product.gemm.meta["val"].device)
        # Inductor takes the tail into a reduction behind it for nothing: there the GEMMs alone compare.
        fused = None if product.before_reduction else product.fused
        if self.tunes and not known.complete(product.alone, fused):
            in_a_thread(lambda: known.measure(product.alone, fused))
        verdict = known.verdict(product.alone, fused)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What the store knows of GEMMs in compiled graphs, on one machine under some settings."""

    device: DeviceInfo
    settings: Settings
    store: Store

    @classmethod
    def here(cls, device: torch.device) -> Knowledge:
        """That of the settings in force."""
        settings = settings_module.current()
        return cls(device=detect(device), settings=settings, store=open_store(settings))

    def complete(self, alone: Problem, fused: Problem | None) -> bool:
        """Nothing is left to measure."""
        if not all(self._candidates(problem).complete for problem in (alone, fused) if problem is not None):
            return False
        ways = [] if fused is None else self._ways(alone, fused)
        return fused is None or len(ways) < 2 or self._measured(fused, ways)

    def knows(self, problem: Problem) -> bool:
        """There is a stored pick."""
        return self._candidates(problem).picked is not None

    def verdict(self, alone: Problem, fused: Problem | None) -> Verdict:
        """What beats torch's GEMM, or with a tail torch's GEMM and Inductor's kernel, by more than a tie."""
        of_gemm = self._of_gemm(alone)
        if fused is None or self._candidates(alone).picked is None:
            return of_gemm
        ways = self._ways(alone, fused)
        times = self._times(fused, ways)
        if len(ways) == 1:
            return of_gemm
        if "untouched" not in times:
            return dataclasses.replace(of_gemm, reason=f"{of_gemm.reason}; with its tail not compared with Inductor's kernel")
        told = tuple(times.items())
        best = min(times, key=times.__getitem__)
        if best == "untouched" or times[best] > (1 - TIE) * times["untouched"]:
            return Verdict(taken="", reason="torch's GEMM with Inductor's kernel is as fast", times_us=told)
        return Verdict(taken=best, reason="faster than torch's GEMM with Inductor's kernel", times_us=told)

    def measure(self, alone: Problem, fused: Problem | None) -> None:
        """Tune the GEMM and the fused one, then time the ways of both against each other. What is known is not measured again."""
        problems = [alone] if fused is None else [alone, fused]
        tune(problems, settings=self.settings, progress=False, device=str(self.device.torch_device))
        ways = [] if fused is None else self._ways(alone, fused)
        if fused is None or len(ways) < 2 or self._measured(fused, ways):
            return
        with open_session(fused, self.device, self.settings, host_us(self.device, self.settings)) as session:
            ranked = session.rank(ways).times
        measured_at = now()
        rows = [
            Row(
                key=_key(fused),
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
        return candidates_for(problem, self.device, self.settings).stored(self.store)

    def _of_gemm(self, problem: Problem) -> Verdict:
        candidates = self._candidates(problem)
        pick = candidates.picked
        if pick is None:
            return Verdict(taken="", reason="not tuned")
        if pick.baseline:
            return Verdict(taken="", reason="torch's own is as fast")
        outcomes = candidates.known.values()
        torch_us = next((o.direct_us for o in outcomes if o.baseline and o.direct_us), None)
        ours_us = candidates.known[pick.content_hash].direct_us
        told = (("torch", torch_us), ("alone", ours_us))
        times = tuple((name, time_us) for name, time_us in told if time_us is not None)
        return Verdict(taken="alone", reason="faster than torch's own", times_us=times)

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

    def _measured(self, fused: Problem, ways: Iterable[CompiledVariant]) -> bool:
        """Each of the ways was timed, or failed then."""
        rows = self.store.rows(_key(fused), fingerprint_text(self.device, self.settings.timing))
        return all(way.content_hash in rows for way in ways)

    def _times(self, fused: Problem, ways: Iterable[CompiledVariant]) -> dict[Variant, float]:
        """The times of these ways that the store has from one measurement, the last that included torch's."""
        rows = self.store.rows(_key(fused), fingerprint_text(self.device, self.settings.timing))
        found = {way.variant: row for way in ways if (row := rows.get(way.content_hash)) is not None and row.time_us}
        begun = found["untouched"].measured_at if "untouched" in found else ""
        return {variant: row.time_us for variant, row in found.items() if row.measured_at == begun and row.time_us}


def tune_for_compile(problems: Iterable[Problem]) -> None:
    """Tune problems for compiled graphs.

    Each is tuned with and without its epilogue, and both are timed against torch's GEMM followed by Inductor's kernel.
    """
    for problem in problems:
        alone = problem if problem.epilogue is None else without_epilogue(problem)
        Knowledge.here(detect(problem.device_type).torch_device).measure(alone, None if alone is problem else problem)


def without_epilogue(problem: Problem) -> Problem:
    """The product alone, in the dtype that it has by itself."""
    dtype = problem.operation.result_dtype(problem.dtype, epilogue=False)
    return dataclasses.replace(problem, epilogue=None, out=dataclasses.replace(problem.out, dtype=dtype))


def _key(fused: Problem) -> str:
    """The store's key for ways to compile a problem, which are no choices for a call of it."""
    return canonical(fused.to_json() | {"compiled": "inductor"})
