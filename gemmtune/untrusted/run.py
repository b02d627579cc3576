"""State of the calls of one shape."""

import random
from dataclasses import dataclass, field

import torch

from ..declaration.calling import Caller
from .checks import Checker
from .mean_errors import Trouble
from .memory import POISON

WITH_OUT, WITH_RESULT = 0.3, 0.7
"""Share of untimed calls that get ``out``, if the GEMM declares it, and of these with the result of the call before."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Calls of one shape until now."""

    checker: Checker
    call: Caller
    rng: random.Random
    composed: bool = False
    """Operands have several kinds of structure."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    repeats: list[tuple[float, float]] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)
    last: bytes = b""
    result: object = None
    """Latest result."""
    wrong: list[tuple[int, Trouble, bool]] = field(default_factory=list)
    right: dict[bytes, int] = field(default_factory=dict)
    """Number of the operands by the hash of their right result. A GEMM that leaves some numbers out repeats wrong ones only."""
    profiled: frozenset[int] = frozenset()
    """Numbers of the calls after which another one is profiled."""
    ran: list[frozenset[str]] = field(default_factory=list)
    bits: list[bool] = field(default_factory=list)
    bits_profiled: list[bool] = field(default_factory=list)
    follows: list[bool] = field(default_factory=list)
    departs: bool | None = None
    """None until the bits differ in the twin."""
    moves: bool | None = None
    """None until a result differs from the twin's nearly as torch's does."""
    twins: int = 0
    by_torch: object = None
    of_torch: bytes = b""
    """Digest of torch's latest result, which is ``by_torch``."""
    calls: int = 0
    numbers: int = 0
    """Number of different operands until now."""
    current: int = 0
    """Number of the operands of the latest call."""
    of_kept: int = 0
    """Number of those that the next call may change or repeat."""

    def out(self, device: torch.device, *, is_first: bool) -> torch.Tensor | None:
        """Return ``out`` for some calls: unwritten, as for the first two, or with the result before."""
        if not is_first and self.rng.random() > WITH_OUT:
            return None
        layout = self.checker.problem.out
        whole = torch.full((layout.numel * layout.dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
        out = whole.view(layout.dtype).view(layout.size)
        old = self.result if not is_first and self.rng.random() < WITH_RESULT else None
        if isinstance(old, torch.Tensor) and old.shape == out.shape:
            return out.copy_(old)
        return out
