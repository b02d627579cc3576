"""Results as a tuning gives them, made by hand."""

from __future__ import annotations

from typing import Any

import torch

from gemmtune import Problem
from gemmtune.choice import Refusal, Status
from gemmtune.selector.result import Outcome, ProblemResult

PROBLEM = Problem.mm(16, 4096, 4096, dtype=torch.float32, device_type="cpu")


def outcome(name: str, time_us: float | None = None, **fields: Any) -> Outcome:
    """A right finalist, unless ``fields`` say otherwise."""
    defaults: dict[str, Any] = {"status": Status.OK, "error_over_bound": 0.03125, "finalist": True, "content_hash": name}
    return Outcome(name=name, backend=name.split(":")[0], time_us=time_us, **(defaults | fields))


def failure(name: str, status: Status, reason: str) -> Outcome:
    """A choice that was left out."""
    return outcome(name, status=status, reason=reason, error_over_bound=None, finalist=False)


def problem_result(*outcomes: Outcome, refusals: tuple[Refusal, ...] = (), **fields: Any) -> ProblemResult:
    """A result whose pick is the first outcome, unless ``fields`` say otherwise."""
    defaults: dict[str, Any] = {
        "problem": PROBLEM,
        "pick": outcomes[0].name if outcomes else None,
        "limit_us": 1000.0,
        "seconds": 4.25,
        "source": "measured",
    }
    return ProblemResult(outcomes=outcomes, refusals=refusals, **(defaults | fields))


FAST = outcome("cpp:avx512_12x32", 2000.0)
TORCH = outcome("aten:mm", 5000.0, baseline=True)
