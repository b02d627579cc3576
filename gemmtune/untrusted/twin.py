"""Twin of a GEMM: a new process of it in which torch's products on a CPU have other bits and take longer.

If some calls have the bits of torch's products here, and those of torch's other products there, torch computes them. It does not
matter from where, by which function, or if the GEMM hides when it is observed: nothing shows in which process it runs.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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

    @classmethod
    def of(cls, result: object, process: Candidate) -> "Answer":
        """Return the latest answer of a process."""
        return cls(bits=digest(result), cpu_s=process.last.cpu_s)


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


def digest(result: object) -> bytes:
    """Return a hash of the bits of a result."""
    if not isinstance(result, torch.Tensor) or not result.numel():
        return b""
    return hashlib.blake2b(result.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


@functools.cache
def telling() -> bool:
    """Return True if other libraries have other bits than torch's. numpy may multiply by the same one."""
    a, b = (torch.linspace(-1, 1, 120 * 360).sin().view(size) for size in ((120, 360), (360, 120)))
    return not torch.equal(a @ b, torch.from_numpy(a.numpy() @ b.numpy()))


class Twin:
    """Twin of a GEMM and of torch. It is given up if the GEMM does not work in two processes."""

    def __init__(self, candidate: Candidate, declared: Mapping[str, Any], *, sandbox: bool, timeout_s: float) -> None:
        self._candidate = Candidate(candidate.target, sandbox=sandbox, timeout_s=timeout_s, is_twin=True)
        self._declared = declared
        self._subject: Subject | None = None

    def compared(
        self, problem: Problem, operands: Operands, place: int | None, here: tuple[Answer, Answer]
    ) -> tuple[Any, Comparison] | None:
        """Return the GEMM's result there, and the comparison with the answers ``here``, of it and of torch. None if it has none."""
        found = []
        try:
            self._subject = self._subject or subject_of(self._candidate, self._declared)
            for subject, process in ((self._subject, self._candidate), rival("cpu", is_twin=True)):
                process.place = place
                result = subject.caller(problem)(operands.tensors, operands.scalars, None)
                found.append((result, Answer.of(result, process)))
        except (RemoteError, CandidateEnded, Impossible):
            return None
        (own, there), (_, torch_there) = found
        return own, Comparison(here=here[0], there=there, torch_here=here[1], torch_there=torch_there)

    def close(self) -> None:
        """End the process of the GEMM."""
        self._candidate.close()
