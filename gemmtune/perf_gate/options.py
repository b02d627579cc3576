"""What a gate is asked to do. Plain data: the command's help needs no torch."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from ..errors import GateError

FOLDER = "benchmarks/baselines"
PICK = "pick"
"""The candidate that is whatever gemmtune runs."""

Anchor = Literal["torch", "baseline"]
ANCHORS: tuple[Anchor, ...] = typing.get_args(Anchor)
LEAST_PROCESSES = 3
PROCESSES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The options of one gate.

    ``candidate`` is what is judged (see ``subjects.subject_for``). The anchor is torch's own operation in the same process, or with
    ``anchor="baseline"`` the stored ratio to it.

    Raises:
        GateError: options that do not go together.
    """

    device: str | None = None
    candidate: str = PICK
    anchor: Anchor = "torch"
    baselines: str = FOLDER
    require_baseline: bool = False
    """A problem without a baseline is a failure, not INCONCLUSIVE. Only with ``anchor="baseline"``."""
    update_baseline: bool = False
    """Write what is measured as the new baselines."""
    processes: int = PROCESSES
    """Fresh processes in a batch."""

    def __post_init__(self) -> None:
        if self.anchor not in ANCHORS:
            raise GateError(f"anchor: got {self.anchor!r}, expected one of {', '.join(ANCHORS)}")
        if self.processes < LEAST_PROCESSES:
            raise GateError(
                f"processes: got {self.processes}, expected at least {LEAST_PROCESSES}: fewer tell nothing of the noise"
            )
        if self.candidate != PICK and (self.anchor == "baseline" or self.update_baseline):
            raise GateError(f"baselines: got the candidate {self.candidate!r}, expected none: they hold what gemmtune picks")
        if self.require_baseline and self.anchor != "baseline":
            raise GateError(f"require_baseline: got anchor {self.anchor!r}, expected 'baseline'")
