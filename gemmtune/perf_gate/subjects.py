"""What is timed, each as a Choice: gemmtune's pick, torch's own operation, a choice by its name, anybody's function."""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.table import BACKENDS
from ..choice import Choice, Kernel, Scalars, Tensors
from ..conformance.gemms.subject import Call, Subject, SubjectSpec, load
from ..conformance.gemms.traits import Traits
from ..device import DeviceInfo
from ..dispatch.plan import fallback, plan_for
from ..errors import GateError
from ..numerics.operands import Operands
from ..problem import Problem
from ..selector.offers import widest_offers_for
from ..settings import Settings
from .options import PICK

__all__ = ["TORCH", "FunctionChoice", "subject_for"]

TORCH = "torch"
MOST_RESULTS_KEPT = 64


def subject_for(name: str, problem: Problem, device: DeviceInfo, settings: Settings) -> Choice:
    """The choice that ``name`` means for a problem.

    ``pick`` is what ``gemmtune`` runs, tuned now if the settings allow it and the store knows no answer; ``torch`` is torch's own
    operation; ``cpp:…`` or another name that begins with a backend's is that choice; anything else is a function under test, as
    ``package.module:function``.

    Raises:
        GateError: there is nothing to time, or no such choice.
    """
    if problem.empty or 0 in problem.summed:
        raise GateError("size: got 0, expected a product that takes time")
    if name == PICK:
        return plan_for(problem, -1 if device.type == "cpu" else device.index).choice
    if name == TORCH:
        return fallback(problem, device, settings).choice
    if name.partition(":")[0] in BACKENDS:
        return _named(name, problem, device, settings)
    return FunctionChoice.of(name, problem, device)


def _named(name: str, problem: Problem, device: DeviceInfo, settings: Settings) -> Choice:
    choices = {choice.name: choice for choice in widest_offers_for(problem, device, settings).choices}
    if name not in choices:
        known = ", ".join(list(choices)[:20]) + (f" and {len(choices) - 20} more" if len(choices) > 20 else "")
        raise GateError(f"choice: got {name!r}, expected one of {known or 'none, for the settings offer nothing here'}")
    return choices[name]


@dataclass(frozen=True, kw_only=True)
class FunctionChoice(Choice):
    """A GEMM under test (see conformance/subject.py) as a choice. It is imported where it is built, and never verified."""

    target: str
    results_kept: int
    """Results of calls without ``out=`` are kept for so many calls, so that each call writes to other memory, as kernels with
    ``out`` do, rather than to one result that stays in the cache."""

    @classmethod
    def of(cls, target: str, problem: Problem, device: DeviceInfo) -> FunctionChoice:
        """The choice for a function by name. Raises GateError for a problem with an epilogue, which no such function takes."""
        if problem.epilogue is not None or problem.prepacked:
            raise GateError(f"{target}: got {problem}, expected a problem without an epilogue and without a packed b")
        out_bytes = max(problem.out.numel * problem.out.dtype.itemsize, 1)
        return cls(
            name=target,
            backend="function",
            problem=problem,
            claims=Traits().claims(problem),
            target=target,
            results_kept=min(MOST_RESULTS_KEPT, math.ceil(2 * device.last_level_cache_bytes / out_bytes)),
        )

    @property
    def content_hash(self) -> str:
        """A hash of the name: what the function does is not known."""
        return hashlib.sha256(self.target.encode()).hexdigest()

    def load(self) -> Subject:
        """Import the function. Raises SubjectError if that cannot be done."""
        return load(SubjectSpec(target=self.target))

    def bind(self, loaded: Subject) -> Kernel:
        """Calls of the function."""
        return _kernel(loaded, self.problem, self.results_kept)


def _kernel(subject: Subject, problem: Problem, results_kept: int) -> Kernel:
    kept: collections.deque[object] = collections.deque(maxlen=max(results_kept, 1))
    into = _calls(problem, with_out=subject.traits.out)
    fresh = _calls(problem, with_out=False)

    def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
        kept.append(subject(into(out, tensors, scalars)))

    def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
        result = subject(fresh(tensors[0], tensors, scalars))
        assert isinstance(result, torch.Tensor)
        return result

    return Kernel(run=run, run_new=run_new)


def _calls(problem: Problem, *, with_out: bool) -> Callable[..., Call]:
    """Makes the arguments of a call once for each operand set: making them takes longer than a short kernel's launch."""
    known: dict[int, Call] = {}

    roles = [role for role, _ in problem.operands]

    def call(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> Call:
        found = known.get(id(out))
        if found is None:  # holds the tensors, so that no other one can have this id later
            alpha, beta = scalars or (1.0, 0.0)
            given: dict[str, Any] = dict(zip(roles, tensors, strict=True))
            operands = Operands(out=out, extra=(), alpha=alpha, beta=beta, encoding=problem.encoding, **{"inp": None, **given})
            found = known[id(out)] = Call(problem=problem, operands=operands, out=out if with_out else None)
        return found

    return call
