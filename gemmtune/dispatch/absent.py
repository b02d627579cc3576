"""Stored picks that cannot run on this machine, such as kernels that are not in its cache folder where there is no compiler."""

import dataclasses
from collections.abc import Sequence

from ..backends.table import TEMPLATES, load
from ..choice import Choice, Status
from ..device import DeviceInfo
from ..problem import Problem
from ..problem.rows import RowClass
from ..selector.candidates import Candidates
from ..selector.offers import enabled_backends, known_variants, legal_offers, named_choice, widest_offers_for
from ..selector.segments import Segment
from ..settings import Settings
from ..store.store import Row, open_store
from ..timing.rounds import TIE
from ..warning import warn

REMEDY = "bring the cache folder of the machine that tuned (gemmtune bundle), or install what is missing and tune again"

_said: list[str] = []
_outdated: list[str] = []


def announce_absent(problem: Problem, reason: str, runs: Choice) -> None:
    """Warn once in a process that the stored pick for a problem cannot run."""
    if not _said:
        _said.append(reason)
        warn(
            f"{problem}: the stored pick cannot run here: {reason}. {runs.name} runs instead; other problems may be affected too, "
            f"without a warning. To use what was tuned, {REMEDY}."
        )


def announce_if_absent(candidates: Candidates, runs: Choice) -> None:
    """Warn once in a process if a stored choice is faster than the one that runs, and cannot run on this machine."""
    problem, device, settings = candidates.problem, candidates.device, candidates.settings
    if _said or problem.empty or settings.tune == "force" or not candidates.offers.refusals:
        return
    rows = open_store(settings).rows(problem.key, candidates.fingerprint)
    own = rows.get(runs.content_hash)
    right = [row for row in rows.values() if row.status is Status.OK and row.time_us and row.content_hash not in candidates.choices]
    best = min(right, key=lambda row: row.time_us or 0.0, default=None)
    if best is None or (own is not None and own.time_us and own.time_us <= (1 + TIE) * (best.time_us or 0.0)):
        return
    reason = why_absent(best, problem, device, settings, candidates)
    if reason is not None:
        announce_absent(problem, f"{best.name}: {reason}", runs)


def why_absent(row: Row, problem: Problem, device: DeviceInfo, settings: Settings, candidates: Candidates) -> str | None:
    """Return what this machine lacks for a stored choice. None if the choice exists, or if the settings leave it out."""
    if row.backend not in enabled_backends(device, settings):
        return None
    missing = next((refusal.reason for refusal in candidates.offers.refusals if refusal.name == row.backend), None)
    if missing is not None:
        return missing
    choice = offered_anywhere(row.content_hash, row.backend, problem, device, settings)
    return choice.obstacle if choice is not None else None


def offered_anywhere(content_hash: str, backend: str, problem: Problem, device: DeviceInfo, settings: Settings) -> Choice | None:
    """Return the choice with this hash that this version of gemmtune offers on some machine, or None."""
    alone = dataclasses.replace(settings, backends=(backend,), template_min_gemm_size=0)
    choices = widest_offers_for(problem, device, alone, on_this_machine=False).choices
    found = known_variants(choices, {content_hash}, alone) | {c.content_hash: c for c in choices}
    return found.get(content_hash)


def older_kernels(stored: Sequence[Row | Segment], problem: Problem, device: DeviceInfo, settings: Settings) -> set[str]:
    """Return the hashes of stored kernels that gemmtune compiles and this version would not, whatever the settings leave out.

    Kernels of backends that are not available count as present.
    """
    widest = Settings(search="exhaustive", deterministic=False, cutlass_dir=settings.cutlass_dir, ck_dir=settings.ck_dir)
    older = set[str]()
    for backend in {x.backend for x in stored}.intersection(TEMPLATES):
        if not load(backend).available(device).ok:
            continue
        alone = dataclasses.replace(widest, backends=(backend,))
        names = {x.content_hash: x.name for x in stored if x.backend == backend}
        made = {x: named_choice(name, backend, problem, device, alone, on_this_machine=False) for x, name in names.items()}
        older |= {digest for digest, choice in made.items() if choice is not None and choice.content_hash != digest}
        left = {digest for digest, choice in made.items() if choice is None}
        choices = legal_offers(problem, device, alone, on_this_machine=False).choices if left else ()
        left -= {c.content_hash for c in choices}
        older |= left - known_variants(choices, left, alone).keys()
    return older


def announce_outdated(rows_class: RowClass, name: str, remedy: str) -> None:
    """Warn once in a process that a table is of another version of gemmtune."""
    if not _outdated:
        _outdated.append(name)
        warn(
            f"{rows_class}: its table is not used, because this version of gemmtune has another {name}. Make it again: {remedy}. "
            "Other tables may be affected too, without a warning."
        )
