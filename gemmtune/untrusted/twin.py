"""Other processes of a GEMM: one that is called as programs do, and a twin, in which torch's products have other bits.

A GEMM that has the bits of torch's products here, and those of torch's other products there, lets torch do the work. It does not
matter from where, by which function, or if it hides when it is observed: nothing shows in which process it runs.
"""

import functools
import hashlib
import os
import random
import re
from collections.abc import Mapping
from typing import Any

import torch

from ..declaration.subject import Impossible, Subject
from ..errors import SubjectError
from ..numerics.operands import Operands
from ..problem import Problem
from .candidate import Candidate, CandidateEnded, RemoteError
from .subject import rival, subject_of

MODES = ("plain", "no_grad", "inference", "inference")
"""Modes of torch in which programs call a GEMM."""
OFTEN, MOST_TIMES = 0.6, 3
"""Share of the calls in another thread than the main one, on one core, and with a parameter. Most calls without a pause."""
WRITTEN = re.compile(r"^(?:MKL_VERBOSE \w*?(GEMM|GEMV|SYMM|SYRK|TRMM|TRSM)|onednn_verbose,.*,exec,cpu,(\w+))", re.MULTILINE)
"""Lines that MKL and oneDNN write about each product, wherever it is called from."""


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


class _Again:
    """Another process of a GEMM. It is given up if the GEMM does not work in two processes."""

    def __init__(self, candidate: Candidate, declared: Mapping[str, Any], *, sandbox: bool, timeout_s: float) -> None:
        self._candidate = Candidate(candidate.target, sandbox=sandbox, timeout_s=timeout_s, is_twin=isinstance(self, Twin))
        self._declared = declared
        self._subject: Subject | None = None

    def _result(self, problem: Problem, operands: Operands) -> Any:
        self._subject = self._subject or subject_of(self._candidate, self._declared)
        return self._subject.caller(problem)(operands.tensors, operands.scalars, None)

    def close(self) -> None:
        """End the process of the GEMM."""
        self._candidate.close()


class Twin(_Again):
    """Twin of a GEMM, next to one of torch."""

    def _written(self, begin: int = 0) -> bytes:
        """Return the output of the process of the GEMM from a byte on."""
        file = self._candidate.output()
        return b"" if file is None else os.pread(file, os.fstat(file).st_size, begin)

    def results(self, problem: Problem, operands: Operands, place: int | None) -> tuple[Any, Any, frozenset[str]] | None:
        """Return the results of the GEMM and of torch there, and the products of torch's libraries, or None without a result."""
        try:
            torch_there, process = rival("cpu", is_twin=True)
            self._candidate.place = process.place = place
            self._subject = self._subject or subject_of(self._candidate, self._declared)
            before = len(self._written())
            own = self._result(problem, operands)
            words = WRITTEN.findall(self._written(before).decode(errors="replace"))
            ran = frozenset(f"mkl::{blas}" if blas else f"onednn::{dnn}" for blas, dnn in words)
            return own, torch_there.caller(problem)(operands.tensors, operands.scalars, None), ran
        except (SubjectError, RemoteError, CandidateEnded, Impossible):
            return None


class InUse(_Again):
    """A GEMM that is called as programs do, not as a judge does.

    It runs in threads, in torch's modes, on tensors that are as large as their memory, and without a pause.
    """

    def result(self, problem: Problem, operands: Operands, rng: random.Random) -> tuple[Any, str] | None:
        """Return the result of a call in a drawn manner, and the manner in words. None if the GEMM has none."""
        mode, times = rng.choice(MODES), rng.randint(1, MOST_TIMES)
        thread, one_core, parameter = (rng.random() < OFTEN for _ in range(3))
        self._candidate.manner = {
            "mode": mode, "thread": thread, "one_core": one_core, "parameter": parameter, "times": times,
        }  # fmt: skip
        try:
            result = self._result(problem, operands)
        except (SubjectError, RemoteError, CandidateEnded, Impossible):
            return None
        words = [f"mode {mode} of torch", f"{'another' if thread else 'the main'} thread", f"{times} calls without a pause"]
        words += ["one core for torch"] * one_core + ["b is a parameter"] * parameter
        return result, f"in a new process ({', '.join(words)})"
