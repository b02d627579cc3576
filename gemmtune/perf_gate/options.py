"""Options of a gate. Plain data, so that the command's help needs no torch."""

import typing
from dataclasses import dataclass
from typing import Literal

from ..errors import GateError

FOLDER = "benchmarks/baselines"
PICK = "pick"
"""Name of the candidate that gemmtune picks."""

Reference = Literal["torch", "baseline"]
REFERENCES: tuple[Reference, ...] = typing.get_args(Reference)
LEAST_PROCESSES = 3
LIMIT = 2.0
"""Slow-down in percent that is allowed."""
MOST_LIMIT = 100.0
PROCESSES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """Options of one gate. Raises GateError for an illegal value, or options that conflict.

    ``candidate`` is judged (see ``subjects.subject_for``) against torch's own operation in the same process or, with
    ``reference="baseline"``, against the stored ratio to torch.
    """

    device: str | None = None
    candidate: str = PICK
    reference: Reference = "torch"
    baselines: str = FOLDER
    require_baseline: bool = False
    """Fail for a problem without a baseline, instead of calling it INCONCLUSIVE. Needs ``reference="baseline"``."""
    strict: bool = False
    """Fail if a problem is INCONCLUSIVE. Otherwise the gate fails only if all are."""
    update_baseline: bool = False
    """Write the measurements as new baselines."""
    processes: int = PROCESSES
    """Fresh processes in a batch."""

    limit: float = LIMIT
    """Slow-down in percent that is allowed. PASS excludes one of 2.5 times as much."""

    def __post_init__(self) -> None:
        if self.reference not in REFERENCES:
            raise GateError(f"reference: got {self.reference!r}, expected one of {', '.join(REFERENCES)}")
        if self.processes < LEAST_PROCESSES:
            raise GateError(f"processes: got {self.processes}, expected at least {LEAST_PROCESSES}: fewer do not show the noise")
        if not 0 < self.limit <= MOST_LIMIT:
            raise GateError(f"limit: got {self.limit}, expected a percentage above 0, up to {MOST_LIMIT:g}")
        if self.candidate != PICK and (self.reference == "baseline" or self.update_baseline):
            raise GateError(
                f"baselines: got the candidate {self.candidate!r}, expected none: they hold what gemmtune picks; "
                "to pick among your own GEMMs alone, use --backends own --with MODULE:FUNCTION"
            )
        if self.require_baseline and self.reference != "baseline":
            raise GateError(f"require_baseline: got reference {self.reference!r}, expected 'baseline'")
