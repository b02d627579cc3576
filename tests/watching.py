"""Plain values that functions of the package return while a test runs, for tests that compare with an earlier version."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

__all__ = ["Watched", "watching"]

PLAIN = {"Resources", "bool", "int", "float", "str", *(f"{kind} | None" for kind in ("bool", "int", "float", "str"))}
"""Annotations of the results that are kept. ``Resources`` has registers and shared memory."""
DIGITS = 4
"""Digits of a float that are kept."""


class Watched:
    """Values since the last look, by function."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a record of each value."""
        texts = self._texts.setdefault(f"{function.__module__}.{function.__qualname__}", [])

        @functools.wraps(function)
        def watched(*given: Any, **named: Any) -> Any:
            value = function(*given, **named)
            if not (isinstance(value, str) and "\n" in value):  # a rendered template
                texts.append(f"{value:.{DIGITS}g}" if isinstance(value, float) else repr(value))
            return value

        return watched

    def taken(self) -> Iterator[str]:
        """Yield the number of values of each function that was called, and their digest. Forget them."""
        for name, texts in sorted(self._texts.items()):
            if texts:
                yield f"{name}: {len(texts)}, {hashlib.sha256(repr(texts).encode()).hexdigest()[:8]}"
                texts.clear()


@contextlib.contextmanager
def watching(*rooms: str, kinds: frozenset[str] = frozenset(PLAIN)) -> Iterator[Watched]:
    """Watch the functions of the loaded modules of some rooms that return plain values. Their caches are emptied first."""
    found, known = Watched(), dict[FunctionType, Callable[..., Any]]()
    prefixes = tuple(f"gemmtune.{room}." for room in rooms)
    modules = [module for name, module in sorted(sys.modules.items()) if f"{name}.".startswith(prefixes)]
    own = [x for module in modules for x in vars(module).values() if f"{getattr(x, '__module__', '')}.".startswith(prefixes)]
    with contextlib.ExitStack() as restored:
        for place in (*modules, *dict.fromkeys(x for x in own if isinstance(x, type))):
            for name, x in list(vars(place).items()):
                if hasattr(x, "cache_clear"):
                    x.cache_clear()
                elif isinstance(x, FunctionType) and f"{x.__module__}.".startswith(prefixes) and _returned(x) in kinds:
                    known.setdefault(x, found.watch(x))
                    setattr(place, name, known[x])
                    restored.callback(setattr, place, name, x)
        yield found


def _returned(function: FunctionType) -> str:
    kind = function.__annotations__.get("return", "")
    return str(getattr(kind, "__name__", kind) if isinstance(kind, type) else kind)
