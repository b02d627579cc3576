"""Blocks of ``with`` that also decorate functions of every kind."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from .errors import SettingsError

P = ParamSpec("P")
T = TypeVar("T")


class Block(Generic[T]):
    """A ``with`` block that may be entered again, also inside of itself, and decorates functions and coroutines.

    contextlib's decorator leaves the block as soon as an ``async def`` has made its coroutine, before any of its lines ran.
    """

    def __init__(self, made: Callable[[], AbstractContextManager[T]]) -> None:
        self._made = made
        self._inside: list[AbstractContextManager[T]] = []

    def __enter__(self) -> T:
        block = self._made()
        value = block.__enter__()
        self._inside.append(block)
        _entered.set((*_entered.get(), block))
        return value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        here = _entered.get()
        # None of them was entered here where a generator is closed elsewhere than it began.
        last = next((x for x in reversed(here) if x in self._inside), self._inside[-1])
        self._inside.remove(last)
        _entered.set(tuple(x for x in here if x is not last))
        return last.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, Any]) -> Callable[P, Any]:
        """Return the function with its calls in the block.

        Raises SettingsError for a generator function: the lines of the caller run between its own.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise SettingsError(
                f"got the generator function {function.__qualname__}, expected a function or coroutine: lines of its caller run "
                "between its own; write a with block around those of its lines that need it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: P.args, **words: P.kwargs) -> Any:
                with self._made():
                    return await function(*args, **words)

            return awaited

        @functools.wraps(function)
        def called(*args: P.args, **words: P.kwargs) -> Any:
            with self._made():
                return function(*args, **words)

        return called


_entered: ContextVar[tuple[AbstractContextManager[Any], ...]] = ContextVar("entered blocks", default=())
"""The blocks in which this thread or task is, from outer to inner."""
