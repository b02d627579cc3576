"""Further calls of a GEMM whose result is wrong. They show its cause, and record no failure."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...numerics.buffers import is_poison
from ...numerics.compare import is_right
from ...numerics.guards import PoisonedAllocations
from ...numerics.operands import Operands
from ...numerics.propagate import Approximate
from ..diagnose import Diagnosis
from ..diagnose.match import DIFFERS, FIRST_CALL, KEPT

CALLED_AGAIN = 3
"""Times that a wrong call is repeated, to see if it is wrong each time."""
MOST_COPIED_BYTES = 2**26
"""Maximum memory of operands that are copied to other addresses."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A wrong call that can be made again, and the mask of its wrong elements (B, M, N)."""

    call: Callable[[Operands, torch.Tensor | None], torch.Tensor | None]
    """Function of operands and ``out`` that returns a result, or None if the call gives none."""
    operands: Operands
    right: Approximate
    bad: torch.Tensor

    def left_unwritten(self) -> torch.Tensor:
        """Return a mask of the wrong elements that stay unwritten in a call whose own memory holds poison.

        Fresh memory of the system holds zeros, which would pass for written ones.
        """
        with PoisonedAllocations():  # type: ignore[no-untyped-call]
            result = self.call(self.operands, None)
        return torch.zeros_like(self.bad) if result is None else self.bad & is_poison(result).reshape(self.bad.shape)

    def diagnosis(self, *, first: bool, stale: bool) -> Diagnosis | None:
        """Repeat the call, in the end with copies of its operands. Return a diagnosis if wrong elements are right now.

        ``first``: the wrong call was the first one of its problem. ``stale``: its result is that of an earlier call.
        """
        copies = self.operands.copied(MOST_COPIED_BYTES) if not stale else ()
        for given in (*[self.operands] * CALLED_AGAIN, *copies):
            right = self._right(given)
            if right is None:
                return Diagnosis(DIFFERS)
            if bool((self.bad & right).any()):
                kept = given is not self.operands
                return Diagnosis(KEPT) if kept else Diagnosis(*(FIRST_CALL, (DIFFERS,)) if first else (DIFFERS,))
        return None

    def adds_to(self, zeros: torch.Tensor) -> bool:
        """Return True if the wrong elements are right when ``out`` holds zeros before the call."""
        right = self._right(self.operands, zeros)
        return right is not None and bool(right[self.bad].all())

    def _right(self, given: Operands, out: torch.Tensor | None = None) -> torch.Tensor | None:
        result = self.call(given, out)
        if result is None:
            return None
        return is_right(result.to(torch.float64).reshape(self.bad.shape), self.right, result.dtype)
