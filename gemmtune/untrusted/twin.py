"""Twin of a GEMM: a new process of it in which torch's products on a CPU have other bits, and take longer.

A GEMM that has the bits of torch's products here, and those of torch's other products there, lets torch do the work. It does not
matter from where, by which function, or if it hides when it is observed: nothing shows in which process it runs.
"""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from ..declaration.subject import Impossible, Subject
from ..numerics.operands import Operands
from ..problem import Problem
from .candidate import Candidate, CandidateEnded, RemoteError
from .subject import rival, subject_of


def digest(result: object) -> bytes:
    """Return a hash of the bits of a result."""
    if not isinstance(result, torch.Tensor) or not result.numel():
        return b""
    return hashlib.blake2b(result.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


@functools.cache
def tells() -> bool:
    """Return True if numpy's products have other bits than torch's. Otherwise both may have one library."""
    a, b = (torch.linspace(-1, 1, 120 * 360).sin().view(size) for size in ((120, 360), (360, 120)))
    return not torch.equal(a @ b, torch.from_numpy(a.numpy() @ b.numpy()))


class Twin:
    """Twin of a GEMM, next to one of torch. It is given up if the GEMM does not work in two processes."""

    def __init__(self, candidate: Candidate, declared: Mapping[str, Any], *, sandbox: bool, timeout_s: float) -> None:
        self._candidate = Candidate(candidate.target, sandbox=sandbox, timeout_s=timeout_s, is_twin=True)
        self._declared = declared
        self._subject: Subject | None = None

    def results(self, problem: Problem, operands: Operands, place: int | None) -> tuple[Any, Any] | None:
        """Return the results of the GEMM and of torch there, or None if the GEMM has none."""
        try:
            self._subject = self._subject or subject_of(self._candidate, self._declared)
            of_both = (self._subject, self._candidate), rival("cpu", is_twin=True)
            for _, process in of_both:
                process.place = place
            own, by_torch = (subject.caller(problem)(operands.tensors, operands.scalars, None) for subject, _ in of_both)
        except (RemoteError, CandidateEnded, Impossible):
            return None
        return own, by_torch

    def close(self) -> None:
        """End the process of the GEMM."""
        self._candidate.close()
