"""Integrity of this process across the import of a user's module, which leaves gemmtune's functions as they are."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from ...errors import SubjectError

T = TypeVar("T")

PACKAGE = __name__.partition(".")[0]
KEPT: tuple[tuple[object, str], ...] = (
    *((torch, name) for name in ("mm", "matmul", "bmm", "addmm", "baddbmm", "equal", "allclose")),
    *((torch.Tensor, name) for name in ("mm", "matmul", "bmm", "__matmul__", "copy_", "__eq__", "double")),
    *((time, name) for name in ("perf_counter", "monotonic", "time")),
    *((torch.cuda.Event, name) for name in ("record", "elapsed_time", "synchronize")),
)
"""Functions outside of gemmtune on which a measurement rests."""


def unchanged(target: str, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which imports a target. Raises SubjectError if it replaced functions, which are put back."""
    before = {(id(owner), name): (owner, value) for owner, name, value in _held()}
    try:
        return work()
    finally:
        changed = [(owner, name, value) for (_, name), (owner, value) in before.items() if _now(owner, name) is not value]
        for owner, name, value in changed:
            setattr(owner, name, value)
        if changed:
            names = ", ".join(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in changed[:3])
            raise SubjectError(f"{target}: its import replaced {names}, expected that it leaves other modules as they are")


def _now(owner: object, name: str) -> object:
    """Return what an owner has under a name, itself and not what a class makes of it."""
    own = vars(owner)
    return own[name] if name in own else getattr(owner, name, None)


def _held() -> Iterator[tuple[object, str, object]]:
    """Yield the functions, methods and properties of gemmtune's modules, and those of KEPT, with their owners and names."""
    for owner, name in KEPT:
        yield owner, name, _now(owner, name)
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] != PACKAGE or module is None:
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                yield module, name, value
            if isinstance(value, type) and value.__module__ == key:
                yield from ((value, each, made) for each, made in list(vars(value).items()) if isinstance(made, _METHODS))


_METHODS = (type(unchanged), property, staticmethod, classmethod)
