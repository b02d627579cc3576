"""Twin of a GEMM: a new process of it in which torch's products on a CPU have other bits and take longer.

If some calls have the bits of torch's products here, and those of torch's other products there, torch computes them. It does not
matter from where, by which function, or if the GEMM hides when it is observed: nothing shows in which process it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..declaration.subject import Impossible, Subject
from ..numerics.operands import Operands
from ..problem import Problem
from .candidate import Candidate, CandidateEnded, RemoteError
from .subject import rival, subject_of

SURE = 2
"""Calls with torch's bits in both processes. One honest call cannot have them."""
LEAST_CALLS = 5
SLOWER, OF_TORCH = 1.5, 2.0
"""Ratios of the CPU time there to that here: of a GEMM that torch slows down, and of torch itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Digest of a result, and the CPU time of its call."""

    bits: bytes
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Answers to one call: of the GEMM and of torch, here and in the twins of both."""

    here: Answer
    there: Answer
    torch_here: Answer
    torch_there: Answer

    @property
    def follows(self) -> bool:
        """True if the GEMM has torch's bits in both processes."""
        return self.here.bits == self.torch_here.bits and self.there.bits == self.torch_there.bits


def follows_torch(comparisons: Sequence[Comparison]) -> str:
    """Return why torch does the work of these calls, or "" if that does not show."""
    telling = [x for x in comparisons if x.torch_here.bits != x.torch_there.bits]
    if (follows := sum(x.follows for x in telling)) >= SURE:
        return f"{follows} of {len(telling)} results have the bits of torch's, also where these are others"
    if len(telling) < LEAST_CALLS or any(x.here.bits == x.there.bits for x in telling):
        return ""
    own, by_torch = (
        min(there.cpu_s for there, _ in pairs) / max(min(here.cpu_s for _, here in pairs), 1e-9)
        for pairs in ([(x.there, x.here) for x in telling], [(x.torch_there, x.torch_here) for x in telling])
    )
    if by_torch < OF_TORCH or own < max(SLOWER, by_torch**0.5):
        return ""
    return f"{len(telling)} results have other bits, and take {own:.1f} times as long, where torch's products do"


class Twin:
    """Twin of a GEMM and of torch. It is given up if the GEMM does not work in two processes."""

    def __init__(self, candidate: Candidate, declared: Mapping[str, Any], *, sandbox: bool, timeout_s: float) -> None:
        self._candidate = Candidate(candidate.target, sandbox=sandbox, timeout_s=timeout_s, is_twin=True)
        self._declared = declared
        self._subject: Subject | None = None

    def answers(self, problem: Problem, operands: Operands, place: int | None) -> tuple[Any, float, Any, float] | None:
        """Return the results and CPU times of the GEMM and of torch, or None if there are none."""
        of_torch, torch_process = rival("cpu", is_twin=True)
        found: list[Any] = []
        try:
            self._subject = self._subject or subject_of(self._candidate, self._declared)
            for subject, process in ((self._subject, self._candidate), (of_torch, torch_process)):
                process.place = place
                found += [subject.caller(problem)(operands.tensors, operands.scalars, None), process.last.cpu_s]
        except (RemoteError, CandidateEnded, Impossible):
            return None
        return tuple(found)  # type: ignore[return-value]

    def close(self) -> None:
        """End the process of the GEMM."""
        self._candidate.close()
