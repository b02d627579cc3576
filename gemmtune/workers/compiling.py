"""Job of a process that compiles. This module needs no torch, so that such a process starts in a tenth of the time."""

from collections.abc import Callable

from ..settings import Settings, use


def run(compilation: Callable[[], object], settings: Settings) -> None:
    """Run a compilation (``Choice.compilation``) under settings. Its exceptions propagate."""
    with use(settings):
        compilation()
