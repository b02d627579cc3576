"""Conduct of an untrusted GEMM: what it does besides computing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    WRONG = "computes wrong results in timed calls"
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


NOTED = frozenset({Conduct.WRITES, Conduct.STARTS, Conduct.ENVIRONMENT, Conduct.THREADS, Conduct.MEMORY})


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
