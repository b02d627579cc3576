"""Other processes of a GEMM: one that is called as programs do, and a twin, in which torch's products have other bits.

A GEMM lets torch do the work if its results have other bits in each twin, and the same ones in each other process. It does not
matter from where, by which function, in what type, or if it hides when it is observed.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..declaration.subject import Impossible, Subject
from ..declaration.traits import Traits
from ..errors import SubjectError
from ..numerics.operands import Operands
from ..problem import Problem
from .candidate import Candidate, CandidateEnded, RemoteError
from .conduct import Conduct
from .folders import left_in
from .gemm_process.journal import AT_START
from .subject import rival, subject_of
from .turns import Turns
from .uses import INFERENCE, OPTIONAL, PLAINLY, UNFIT, drawn, said

BESIDE = 2
"""Number of threads that call at the same time."""
SHOWN = (Conduct.INPUTS, Conduct.AGAIN, Conduct.LAZY)
"""Conduct in a call as in use that counts against the GEMM."""
FAILURES = (SubjectError, RemoteError, CandidateEnded, Impossible)
"""Errors of a GEMM in another process."""
SHORT = re.compile(r"out of memory|allocate memory|^MemoryError|bad_alloc|new thread|temporarily unavailable", re.IGNORECASE)
"""Words of errors of a machine that is short of memory or threads, which prove nothing."""
KEPT = re.compile(r"inference tensor|InferenceMode")
"""Words of errors about tensors that were made in inference mode, and that a GEMM keeps for its later calls."""
WRITTEN = re.compile(r"^(?:MKL_VERBOSE \w*?(GEMM|GEMV|SYMM|SYRK|TRMM|TRSM)|onednn_verbose,.*,exec,cpu,(\w+))", re.MULTILINE)
"""Lines that MKL and oneDNN write about each product, wherever it is called from."""
SURE_OF = 6
"""New twins, and other new processes, that must agree about the bits. A GEMM that picks a way by its time agrees by chance."""
SUSPECT_S = 180.0
"""Seconds for these processes."""
OF_NUMPY = ((120, 120, 360), (24, 40, 32), (7, 300, 2000), (256, 256, 1024))
"""Sizes of products of numpy. Two libraries have equal bits at some of them, as with AVX-512 at the first."""
WARM, WARM_S = 100, 0.5
"""Most calls, and seconds, of each before the one that counts: a GEMM may do other work in its first calls."""


def _line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]


@functools.cache
def tells() -> bool:
    """Return True if some of numpy's products have other bits than torch's. Otherwise both may have one library."""
    for m, n, k in OF_NUMPY:
        a, b = torch.linspace(-1, 1, m * k).sin().view(m, k), torch.linspace(-1, 1, k * n).cos().view(k, n)
        if not torch.equal(a @ b, torch.from_numpy(np.matmul(a.numpy(), b.numpy()))):
            return True
    return False


class _Again:
    """Another process of a GEMM."""

    def __init__(self, candidate: Candidate, declared: Mapping[str, Any], *, is_twin: bool = False, **options: Any) -> None:
        self.candidate = Candidate(candidate.target, is_twin=is_twin, **options)
        self._declared = declared
        self._subject: Subject | None = None

    def result(self, problem: Problem, operands: Operands, place: int | None = None) -> Any:
        """Return the result for operands that begin at a page."""
        self.candidate.place = place
        self._subject = self._subject or subject_of(self.candidate, self._declared)
        return self._subject.caller(problem)(operands.tensors, operands.scalars, None)

    def written(self, begin: int = 0) -> bytes:
        """Return the output of the process from a byte on."""
        fork = self.candidate.fork
        return b"" if fork is None else os.pread(file := fork.output.fileno(), os.fstat(file).st_size, begin)


def _warm(process: _Again, problem: Problem, operands: Operands, place: int | None) -> Any:
    """Return the result of the last of some calls of a new process."""
    result, until = process.result(problem, operands, place), time.monotonic() + WARM_S
    for _ in range(WARM):
        if time.monotonic() > until:
            break
        result = process.result(problem, operands, place)
    return result


class Elsewhere:
    """A GEMM in other processes, each of which is given up if the GEMM does not work there.

    Args:
        candidate: the GEMM, to which a process that ends is noted.
        declared: declarations that override its own.
        has_twin: True if torch must not do the work.
        options: those of a process: ``sandbox`` and ``timeout_s``.
    """

    def __init__(self, candidate: Candidate, declared: Mapping[str, Any], *, has_twin: bool, **options: Any) -> None:
        self._of = candidate
        self._in_use: _Again | None = _Again(candidate, declared, **options)
        self._twin = _Again(candidate, declared, is_twin=True, **options) if has_twin else None
        self._plain = _Again(candidate, declared, **options)
        self._suspect_s, self._fails_beside, self._refused = SUSPECT_S, False, set[tuple[str, object]]()
        self._has_served = False
        self._seen: set[tuple[object, ...]] = set()
        """Sizes that the process in use has met."""
        self.given_up: list[str] = []
        """Processes that were given up, with the reason."""

    def in_use(self, problem: Problem, operands: Operands, turns: Turns, traits: Traits) -> tuple[Any, str] | None:
        """Return the result of a call as programs make it, and its manner in words. None without a result.

        ``drawn`` says how. Errors that only calls in other threads meet count against it, and its end after operands that fit.
        """
        if self._in_use is None:
            return None
        beside = BESIDE if traits.threads and not self._fails_beside else 0
        is_new = (sizes := (problem.dtype, problem.m, problem.n, problem.k)) not in self._seen
        self._seen.add(sizes)
        manner = drawn(problem, operands, turns, traits, beside=beside, refused=self._refused, is_new=is_new)
        try:
            result = self._called_as(manner, problem, operands)
        except FAILURES as error:
            if isinstance(error, CandidateEnded) and manner["first"] in UNFIT:
                self._in_use.candidate.stop()
                self._refused.update(("first", first) for first in UNFIT)
                return self.in_use(problem, operands, turns, traits)
            if isinstance(error, RemoteError) and manner["beside"] and self._is_of_threads(error, problem, operands):
                raised = f"it raised {_line(error)}. Called by one thread, it raises nothing."
                self._of.note(Conduct.SOMETIMES, f"{said(manner)}, {raised}")
                self._fails_beside = True
                return self.in_use(problem, operands, turns, traits)
            found, last = self._without(manner, problem, operands, error)
            if found is not None:
                return found
            if KEPT.search(str(last)) and INFERENCE not in self._refused:
                self._failed("it is not called in inference mode", self._in_use, last)
                self._refused.add(INFERENCE)
                self._seen.clear()
                return self.in_use(problem, operands, turns, traits)
            self._failed("it is not called as in use", self._in_use, last)
            if isinstance(last, RemoteError) and not self._has_served:
                self._refuses_programs(problem, operands)
            self._in_use = None
            return None
        return result, said(manner)

    def _refuses_programs(self, problem: Problem, operands: Operands) -> None:
        """Note an error in a new process like a program's, where it is called plainly, if one like the judge's has none."""
        assert self._in_use is not None
        try:
            self._called_as(PLAINLY, problem, operands)
        except RemoteError as error:
            with contextlib.suppress(*FAILURES):
                self._plain.result(problem, operands)
                if not SHORT.search(str(error)):
                    raised = f"it raised {_line(error)}. In one like the judge's it raises nothing."
                    self._of.note(Conduct.SOMETIMES, f"{said(PLAINLY)}, {raised}")
        except FAILURES:
            return
        finally:
            self._in_use.candidate.stop()
            self._plain.candidate.stop()

    def _without(
        self, manner: Mapping[str, Any], problem: Problem, operands: Operands, error: Exception
    ) -> tuple[tuple[Any, str] | None, Exception]:
        """Return the result of a call in a manner without one part after the other, or None, and the last error.

        What a GEMM refuses is not tried again.
        """
        for part in [part for part, without in OPTIONAL.items() if manner[part] != without]:
            if not isinstance(error, RemoteError):
                break
            refused, manner = (part, manner[part]), {**manner, part: OPTIONAL[part]}
            try:
                result = self._called_as(manner, problem, operands)
            except FAILURES as another:
                error = another
                continue
            self._refused.add(refused)
            return (result, said(manner)), error
        return None, error

    def _called_as(self, manner: Mapping[str, Any], problem: Problem, operands: Operands) -> Any:
        """Return the result of a call in a manner, and note what its process shows."""
        assert self._in_use is not None
        process = self._in_use.candidate
        process.manner = manner
        try:
            result = self._in_use.result(problem, operands)
            self._has_served = True
            return result
        finally:
            for finding in process.findings:
                if finding.kind in SHOWN:
                    self._of.note(finding.kind, f"as in use: {finding.detail}" if finding.detail else "as in use")

    def _is_of_threads(self, error: RemoteError, problem: Problem, operands: Operands) -> bool:
        """Return True if the call that raised an error raises none without other threads beside it."""
        if self._in_use is None or SHORT.search(str(error)):
            return False
        self._in_use.candidate.manner = {**(self._in_use.candidate.manner or {}), "beside": 0}
        try:
            self._in_use.result(problem, operands)
        except FAILURES:
            return False
        return True

    def in_twin(self, problem: Problem, operands: Operands, place: int | None) -> tuple[Any, Any, frozenset[str]] | None:
        """Return the results of the GEMM and of torch there, and the products of torch's libraries, or None without a result."""
        if self._twin is None:
            return None
        try:
            before = len(self._twin.written())
            own = self._twin.result(problem, operands, place)
            words = WRITTEN.findall(self._twin.written(before).decode(errors="replace"))
            ran = frozenset(f"mkl::{blas}" if blas else f"onednn::{dnn}" for blas, dnn in words)
            return own, self.torch_there(problem, operands, place), ran
        except FAILURES as error:
            self._failed("it has no twin", self._twin, error)
            self._twin = None
            return None

    def torch_there(self, problem: Problem, operands: Operands, place: int | None) -> Any:
        """Return the result of torch in a twin."""
        subject, process = rival("cpu", is_twin=True)
        process.place = place
        return subject.caller(problem)(operands.tensors, operands.scalars, None)

    def departs(self, problem: Problem, place: int | None, again: Callable[[], tuple[Operands, Callable[[Any], bool]]]) -> bool:
        """Return True if each of some new twins has another result than the GEMM, and no other new process.

        ``again`` calls the GEMM with new operands, and returns these with a function that says if a result is like the GEMM's.
        """
        begun = time.monotonic()
        if self._twin is None:
            return False
        try:
            for _ in range(SURE_OF):
                operands, is_alike = again()
                for process, same in ((self._plain, True), (self._twin, False)):
                    if time.monotonic() - begun > self._suspect_s:
                        return False
                    process.candidate.stop()
                    if is_alike(_warm(process, problem, operands, place)) is not same:
                        return False
            return True
        except FAILURES as error:
            self._failed("it has no twin", self._twin, error)
            self._twin = None
            return False
        finally:
            self._suspect_s -= time.monotonic() - begun

    @property
    def has_twin(self) -> bool:
        """True while there is a twin."""
        return self._twin is not None

    def give_up(self, reason: str) -> None:
        """Give up all other processes."""
        if self._in_use is not None or self._twin is not None:
            self.given_up.append(f"it is not called in other processes: {reason}")
            self.close()
            self._in_use = self._twin = None

    def _failed(self, what: str, process: _Again, error: Exception) -> None:
        """Note that the GEMM does not work in another process. One that ends counts against it."""
        self.given_up.append(f"{what}: {_line(error)}")
        if isinstance(error, CandidateEnded):
            self._of.note(error.kind, f"in a new process: {error.reason.partition(chr(10))[0]}")
        if process is self._in_use:
            self._note_left()
        process.candidate.stop()

    def _note_left(self) -> None:
        """Note what the process in use has left in its home, whoever wrote that."""
        for path in left_in(fork.home) if self._in_use is not None and (fork := self._in_use.candidate.fork) is not None else ():
            self._of.note(Conduct.REACHES if str(path).endswith(AT_START) else Conduct.WRITES, f"~/{path.name}")

    def close(self) -> None:
        """End the processes."""
        self._note_left()
        for process in (self._in_use, self._twin, self._plain):
            if process is not None:
                process.candidate.stop()
