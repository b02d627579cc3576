"""Conduct of an untrusted GEMM: what it does besides computing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from ..foreign import visible

SHOWN, MOST_DETAILS, MOST_CHARS = 4, 100, 300
"""Details of one kind of conduct that a finding shows, that are kept, and characters of each."""


class Conduct(StrEnum):
    """Kinds of conduct. Those of ``NOTED`` are reported and held against nobody, all others are dishonest."""

    ENDED = "ended its process"
    CRASHED = "crashes"
    HUNG = "did not answer"
    FORGED = "forged an answer"
    BETWEEN = "works between calls"
    LAZY = "returns a lazy tensor"
    ALIAS = "returns memory that it was given"
    AGAIN = "returns memory that it returned before"
    INPUTS = "overwrites its inputs"
    STALE = "returns an earlier result"
    REUSED = "answers repeated operands from memory"
    SOMETIMES = "is right only sometimes"
    WRONG = "computes wrong results"
    ROUGH = "computes in a narrower type than it claims"
    TOO_FAST = "is faster than the hardware"
    CLOCK = "reports less time than the caller's clock"
    REPLACED = "replaces functions"
    SETTINGS = "changes global settings"
    LOOKS = "looks for its judge"
    TORCH = "lets torch do the work"
    WRITES = "writes files"
    STARTS = "starts processes"
    REACHES = "reaches other processes or the network"
    ENVIRONMENT = "changes the environment"
    THREADS = "keeps threads"
    MEMORY = "keeps memory"
    FILES = "keeps files open"


NOTED = frozenset({Conduct.WRITES, Conduct.STARTS, Conduct.ENVIRONMENT, Conduct.THREADS, Conduct.MEMORY})
OF_OTHERS = re.compile(r"FPMATH|TF32|CBWR|_ISA$|FAST_?MATH|REDUCED_PRECISION|^(LD_PRELOAD|LD_AUDIT|PYTHONSTARTUP|BASH_ENV)$")
"""Names in the environment by which libraries that read them later compute in another way, or programs run other code."""
EVENTS = {
    "looks": Conduct.LOOKS, "writes": Conduct.WRITES, "starts": Conduct.STARTS, "replaces": Conduct.REPLACED,
    "reaches": Conduct.REACHES, "lazy": Conduct.LAZY, "torch": Conduct.TORCH,
    "sets": Conduct.SETTINGS, "inputs": Conduct.INPUTS,
}  # fmt: skip
"""Conduct by the kinds of events in the journal of a process."""

_CACHE = "Compute each call anew. A key of a cache must hold every number of a and b."
ADVICE: Mapping[Conduct, str] = MappingProxyType({
    Conduct.CRASHED: "Run the call of that shape in a debugger, or with a sanitizer of the compiler.",
    Conduct.HUNG: "Give --timeout more seconds if it compiles for that long.",
    Conduct.BETWEEN: "Finish all work, threads and processes included, before the call returns.",
    Conduct.LAZY: "Return a plain torch.Tensor whose numbers are there.",
    Conduct.ALIAS: "Return memory of its own, not that of an argument.",
    Conduct.AGAIN: "Return new memory, or a copy: a caller may still hold the earlier result.",
    Conduct.INPUTS: "Leave a and b, and the memory behind them, as they are.",
    Conduct.STALE: _CACHE,
    Conduct.REUSED: _CACHE,
    Conduct.SOMETIMES: "Look for state that calls share (caches, buffers, counters, threads), and for what depends on the caller.",
    Conduct.ROUGH: "Add up in float32, or declare what it does: --trait accumulate=float32:bfloat16 or --trait input_mode=tf32.",
    Conduct.FILES: "Close what a call has opened: a process may have about 1,000 files open.",
    Conduct.TORCH: "Declare --trait calls_torch if torch is meant to do the work.",
    Conduct.SETTINGS: "Leave settings alone, or put them back before the call returns.",
})  # fmt: skip
"""Remedies for the author of a GEMM, by conduct. The other kinds have none but to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of conduct and what showed it."""

    kind: Conduct
    detail: str = ""

    @property
    def dishonest(self) -> bool:
        """True if the finding counts against the GEMM."""
        return self.kind not in NOTED

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)


class Record:
    """Conduct of one GEMM until now."""

    def __init__(self) -> None:
        self._details: dict[Conduct, list[str]] = {}

    def note(self, kind: Conduct, detail: str = "") -> None:
        """Add a finding. Equal details count once."""
        details, detail = self._details.setdefault(kind, []), visible(detail[:MOST_CHARS])
        if detail and detail not in details and len(details) < MOST_DETAILS:
            details.append(detail)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings by kind."""
        return tuple(Finding(kind=kind, detail=_listed(details)) for kind, details in self._details.items())


def _listed(details: Sequence[str]) -> str:
    more = [f"and {len(details) - SHOWN} more"] if len(details) > SHOWN else []
    return "; ".join([*details[:SHOWN], *more])
