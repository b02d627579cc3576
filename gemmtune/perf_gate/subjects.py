"""Timed subjects as choices: gemmtune's pick, torch's own operation, a choice by name, any function."""

import collections
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import settings as settings_module
from ..backends.table import BACKENDS
from ..choice import Choice
from ..declaration.called import CalledChoice
from ..declaration.subject import Subject, SubjectSpec, load
from ..declaration.traits import Traits
from ..device import DeviceInfo
from ..dispatch.ready import plan_for
from ..dispatch.strategies import fallback
from ..errors import GateError, NoValidChoicesError
from ..problem import Problem
from ..selector.offers import widest_offers_for
from ..settings import Settings
from ..timing.rotation import cache_bytes
from .options import PICK

TORCH = "torch"
MOST_RESULTS_KEPT = 64


def subject_for(name: str, problem: Problem, device: DeviceInfo, settings: Settings) -> Choice:
    """Return the choice that ``name`` means for a problem. Raises GemmtuneError if there is none, or the product is empty.

    ``pick`` is what ``gemmtune`` picks, tuned now if it is not stored and the settings allow it, and ``torch`` is torch's own
    operation. A name that begins with a backend, such as ``cpp:…``, is that choice. Anything else is a function to import, as
    ``package.module:function``, or one of our backends, as ``backend:triton``.
    """
    if problem.empty or 0 in problem.summed:
        raise GateError("size: got 0, expected a product that takes time")
    if name == PICK:
        return _pick(problem, device)
    if name == TORCH:
        return fallback(problem, device, settings).choice
    backend = name.partition(":")[0]
    if backend not in BACKENDS:
        return TargetChoice.of(name, problem, device)
    choices = {choice.name: choice for choice in widest_offers_for(problem, device, settings).choices}
    if name not in choices:
        known = ", ".join(list(choices)[:20]) + (f" and {len(choices) - 20} more" if len(choices) > 20 else "")
        raise GateError(f"choice: got {name!r}, expected one of {known or 'none, for the settings offer nothing here'}")
    return choices[name]


def _pick(problem: Problem, device: DeviceInfo) -> Choice:
    """Return the pick. Torch in place of a pick is none: a broken kernel would be judged by torch's time."""
    try:
        with settings_module.patch(fallback_to_aten=False):
            plan = plan_for(problem, -1 if device.type == "cpu" else device.index)
    except NoValidChoicesError as error:
        remedy = "Mend one or enable more backends (settings.backends): torch in place of a pick is not judged."
        raise NoValidChoicesError(error.problem, error.left_out, remedy) from None
    if plan.origin == "fallback":
        raise GateError("pick: got none, so torch runs; expected one in the store: tune the problem, or leave the setting tune on")
    return plan.choice


@dataclass(frozen=True, kw_only=True)
class TargetChoice(CalledChoice):
    """A GEMM under test (see declaration/subject.py) as a choice. It is imported when built, and never verified."""

    target: str
    results_kept: int
    """Number of results of calls without ``out=`` to keep. Each call then writes to other memory, as kernels with ``out`` do. A
    single result would stay in the cache."""

    @classmethod
    def of(cls, target: str, problem: Problem, device: DeviceInfo) -> "TargetChoice":
        """Return the choice for a function by name. Raises GateError for an epilogue or a packed b, which no function takes."""
        if problem.epilogue is not None or problem.prepacked:
            raise GateError(f"{target}: got {problem}, expected a problem without an epilogue and without a packed b")
        out_bytes = max(problem.out.numel * problem.out.dtype.itemsize, 1)
        return cls(
            name=target,
            backend="function",
            problem=problem,
            claims=Traits().claims(problem),
            target=target,
            results_kept=min(MOST_RESULTS_KEPT, math.ceil(2 * cache_bytes(device) / out_bytes)),
        )

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(self.target.encode()).hexdigest()

    def load(self) -> Subject:
        """Import the function. Raises SubjectError if that fails."""
        return load(SubjectSpec(target=self.target))

    def keeper(self) -> Callable[[object, torch.Tensor], object]:
        kept: collections.deque[object] = collections.deque(maxlen=max(self.results_kept, 1))
        return lambda result, out: kept.append(result)  # noqa: ARG005 - nothing is written to out
