"""Python functions as choices: their calls, with a check of their results."""

import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import forks
from ..choice import Choice, Kernel, Scalars, Tensors
from ..errors import ErrorFromChoice
from ..problem.dtypes import dtype_name
from .calling import Caller
from .subject import Subject


@dataclass(frozen=True, kw_only=True)
class CalledChoice(Choice):
    """Choice whose kernel is a Python function. Subclasses name and find it, as a ``Subject``."""

    @abstractmethod
    def load(self) -> Subject:
        """Return the function."""

    @property
    def own_results(self) -> bool:
        """False, because a function may return memory that it returned before."""
        return False

    def bind(self, loaded: Subject) -> Kernel:
        """Return the kernel of the function's calls, one thread at a time unless it declares ``threads``."""
        takes_out, call, keep = loaded.traits.out, loaded.caller(self.problem), self.keeper()
        if not loaded.traits.threads:
            call = _in_turn(call, _locks.setdefault(loaded.name, forks.lock()))

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            result = call(tensors, scalars, out if takes_out else None)
            if not takes_out:
                keep(result, out)
            elif isinstance(result, torch.Tensor) and result.data_ptr() != out.data_ptr():
                raise ErrorFromChoice(self.name, str(self.problem), "out= was given, but the call returned another tensor")

        def run_new(tensors: Tensors, scalars: Scalars) -> torch.Tensor:
            return self._checked(call(tensors, scalars, None), tensors[0].device).contiguous()

        return Kernel(run=run, run_new=run_new)

    def keeper(self) -> Callable[[object, torch.Tensor], object]:
        """Return the function ``keep(result, out)`` for results of calls without ``out=``. It checks and copies them."""
        return lambda result, out: out.copy_(self._checked(result, out.device))

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
"""Locks by the function's name: one for all choices of a function in this process."""


def _in_turn(call: Caller, lock: threading.Lock) -> Caller:
    """Return the call restricted to one thread at a time."""

    def locked(tensors: Tensors, scalars: Scalars, out: torch.Tensor | None) -> object:
        with lock:
            return call(tensors, scalars, out)

    return locked
