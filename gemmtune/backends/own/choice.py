"""User-supplied GEMM as a choice: its calls, with a check of their results."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

import torch

from ...choice import Choice, Kernel, Scalars, Tensors
from ...declaration.calling import Caller
from ...declaration.legality import why_not
from ...declaration.subject import Subject
from ...device import DeviceInfo
from ...errors import ErrorFromChoice, UnavailableError
from ...problem import Problem
from ...problem.dtypes import dtype_name
from .targets import Loaded, loaded

NAME = "own"


@dataclass(frozen=True, kw_only=True)
class OwnChoice(Choice):
    """Declared GEMM for one problem. It is passed to other processes by its target's name and imported where it runs."""

    target: str
    digest: str = field(repr=False)
    folder: str = field(repr=False)

    @classmethod
    def of(cls, source: Loaded, subject: Subject, problem: Problem) -> OwnChoice:
        """Return the choice for a problem that the declarations cover."""
        return cls(
            name=f"{NAME}:{source.target}",
            backend=NAME,
            problem=problem,
            claims=subject.traits.claims(problem),
            info={"version": source.version} if source.version else {},
            target=source.target,
            digest=source.digest,
            folder=source.folder,
        )

    @property
    def content_hash(self) -> str:
        """Hash of the name and the digest of sources, version and declarations."""
        return hashlib.sha256(f"{self.name}\0{self.digest}".encode()).hexdigest()

    @property
    def own_results(self) -> bool:
        """False, because a GEMM may return memory that it returned before."""
        return False

    def why_unordered(self, allowing: str) -> str:
        """Explain that determinism is not declared, although the GEMM may well be deterministic."""
        return f"got no deterministic, expected deterministic=True: declare it if equal inputs give equal bits, else set {allowing}"

    def at(self, problem: Problem, device: DeviceInfo) -> OwnChoice | str:
        """Return the GEMM for the problem, or why its declarations do not cover it."""
        source = loaded(self.target, self.folder)
        if not isinstance(source.found, Subject):
            return f"{self.target} is no longer a GEMM"
        return why_not(source.found.traits, problem, device) or self.of(source, source.found, problem)

    @property
    def batch_invariant(self) -> bool:
        """Declared batch invariance."""
        source = loaded(self.target, self.folder)
        return isinstance(source.found, Subject) and source.found.traits.batch_invariant

    def load(self) -> Subject:
        """Import the GEMM.

        Raises:
            SubjectError, TraitsError: it cannot be imported here.
            UnavailableError: the imported GEMM differs from the offered one.
        """
        here = loaded(self.target, self.folder)
        if here.digest != self.digest or not isinstance(here.found, Subject):
            raise UnavailableError(
                f"{self.target}: got another source or version than the one that was offered, because it has changed or another "
                "package has its name here; start the program again"
            )
        return here.found

    def bind(self, loaded: Subject) -> Kernel:
        """Return the kernel of the GEMM's calls, one thread at a time unless it declares ``threads``."""
        problem, takes_out, call = self.problem, loaded.traits.out, loaded.caller(self.problem)
        if not loaded.traits.threads:
            call = _in_turn(call, _locks.setdefault(self.target, threading.Lock()))

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            result = call(tensors, scalars, out if takes_out else None)
            if not takes_out:
                out.copy_(self._checked(result, out.device))
            elif isinstance(result, torch.Tensor) and result.data_ptr() != out.data_ptr():
                raise ErrorFromChoice(self.name, str(problem), "out= was given, but the call returned another tensor")

        def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
            return self._checked(call(tensors, scalars, None), tensors[0].device).contiguous()

        return Kernel(run=run, run_new=run_new)

    def _checked(self, result: object, device: torch.device) -> torch.Tensor:
        """Return the result if it is a tensor of the problem's size, dtype and device, else raise ErrorFromChoice."""
        layout = self.problem.out
        if not isinstance(result, torch.Tensor):
            raise ErrorFromChoice(self.name, str(self.problem), f"returned {type(result).__name__}, expected a tensor")
        if result.shape == layout.size and result.dtype == layout.dtype and result.device == device:
            return result
        got, expected = (tuple(result.shape), result.dtype, result.device), (layout.size, layout.dtype, device)
        shown = [f"{dtype_name(dtype)}{list(size)} on {where}" for size, dtype, where in (got, expected)]
        raise ErrorFromChoice(self.name, str(self.problem), f"returned {shown[0]}, expected {shown[1]}")


_locks: dict[str, threading.Lock] = {}
"""Locks by target: one for all choices of a GEMM in this process."""


def _in_turn(call: Caller, lock: threading.Lock) -> Caller:
    """Return the call restricted to one thread at a time."""

    def locked(tensors: Tensors, scalars: Scalars, out: torch.Tensor | None) -> object:
        with lock:
            return call(tensors, scalars, out)

    return locked
