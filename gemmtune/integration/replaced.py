"""Replacement of a model's Parameters, all or none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def replacing(*, undo: bool = True) -> Iterator[Callable[[nn.Module, str, nn.Parameter], None]]:
    """Yield a function that replaces one Parameter of a module. If the block fails or is interrupted, put all of them back.

    With ``undo`` the replaced Parameters stay in memory until the block ends. Without it they are freed, and nothing is put back.
    """
    before: list[tuple[nn.Module, str, nn.Parameter | None]] = []

    def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if undo:
            before.append((module, name, module._parameters[name]))
        setattr(module, name, parameter)

    try:
        yield replace
    except BaseException:
        for module, name, parameter in reversed(before):
            module._parameters[name] = parameter
        raise
