"""Start of a plugin: off by its setting, installed, or one line that names what the engine's version lacks."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ... import settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Names that the installed engine lacks."""

    version: str
    names: tuple[str, ...]


class Finder:
    """Looks up names of an engine, and keeps those that its version lacks."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.absent: list[str] = []

    def get(self, module: str, name: str) -> Any:
        """Return what a module of the engine has under a name, or None."""
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            self.absent.append(f"{module}.{name}")
            return None

    def check(self, method: Any, functions: Mapping[str, tuple[str, ...]]) -> None:
        """Count each function that a class lacks, or that takes other parameters, among the absent names. None has all."""
        for name, (first, *expected) in functions.items() if method is not None else ():
            function = getattr(method, name, None)
            if function is None or [*inspect.signature(function).parameters] != [first, *expected]:
                self.absent.append(f"{method.__module__}.{method.__name__}.{name}({', '.join(expected)})")

    def check_names(self, place: str, function: Any, expected: Sequence[str]) -> None:
        """Count a function that lacks one of some parameters among the absent names. None was counted before."""
        if function is not None and not {*expected} <= {*inspect.signature(function).parameters}:
            self.absent.append(f"{place}({', '.join(expected)})")

    def missing(self) -> Missing:
        """Return the names that were not found."""
        try:
            version = str(import_module(self.package).__version__)
        except (ImportError, AttributeError):
            version = "(unknown version)"
        return Missing(version=version, names=tuple(self.absent))


def logger(name: str) -> logging.Logger:
    """Return a child of the engine's logger, so that our lines have the level and the format that the user chose there."""
    return logging.getLogger(f"{name.lower()}.gemmtune")


def start(name: str, find: Callable[[], Any], package: str) -> None:
    """Install the plugin of ``package`` with the extension points that ``find`` returns, unless a setting turns it off.

    One line in the log names what the installed engine lacks. The engine then goes on unchanged.
    """
    chosen, log = settings.current(), logger(name)
    if getattr(chosen, name.lower()) == "0" or chosen.disable:
        switch = "GEMMTUNE_DISABLE" if chosen.disable else f"GEMMTUNE_{name.upper()}=0"
        log.info("gemmtune leaves %s as it is, because %s is set", name, switch)
        return
    found = find()
    if isinstance(found, Missing):
        log.warning("gemmtune leaves %s %s as it is, because it lacks %s", name, found.version, ", ".join(found.names))
        return
    import_module(".plugin", package).install(found)  # torch and our operators
