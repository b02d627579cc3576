"""Tables and numbers of loaded modules by which other code is led. Changed ones change programs, and no function is replaced."""

from __future__ import annotations

import builtins
import codecs
import collections.abc
import copyreg
import functools
import linecache
import logging
import numbers
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._config_module import ConfigModule

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

CLASSES = (torch.Tensor, torch.nn.Parameter, np.ndarray, np.float64, float, int, str, bytes, list, dict, tuple, set, object)
"""Classes of which each abstract class of Python is asked if it stands for them."""
LOGGERS = ("torch", "asyncio", "concurrent.futures")
"""Loggers of torch and Python whose errors a caller reads."""
ERRORS = (
    "strict", "ignore", "replace", "backslashreplace", "xmlcharrefreplace", "namereplace", "surrogateescape", "surrogatepass",
)  # fmt: skip
"""Names of Python's own handlers of errors of codecs."""
PACKAGES = tuple({os.path.join(os.path.dirname(next(iter(x.__path__))), "") for x in (torch, np)})
"""Folders of packages, of which those of torch and numpy are watched like Python's own."""


def readers() -> dict[str, Callable[[], object]]:
    """Return functions that say what is in each table. They take all that they use now."""
    return {
        "level of the root logger, and loggers that pass no errors on": _logged(),
        "most lines of a traceback": functools.partial(vars(sys).get, "tracebacklimit"),
        "ignores all warnings": _ignored(),
        "abstract classes of known ones": _abstract(),
        "pickling of known classes": _pickled(),
        "patterns kept by re": _patterns(),
        "sources kept by linecache": _sources(),
        "modules of Python that are others": _foreign(),
        "settings of torch's compiler": _of_compiler(),
        "what torch.load may run": _loadable(),
        "handlers of errors of codecs": _of_codecs(),
    }


def _logged() -> Callable[[], object]:
    root, most = logging.getLogger(), logging.ERROR
    manager: Any = logging.Logger.manager
    loggers, level = [logging.getLogger(name) for name in LOGGERS], logging.Logger.getEffectiveLevel
    return lambda: (root.level, manager.disable < most, [x.name for x in loggers if x.disabled or level(x) > most])


def _ignored() -> Callable[[], object]:
    """Return a function that is true if Python ignores each warning, whatever its text, its module and its kind."""
    space, all_of = vars(warnings), ("ignore", None, Warning, None, 0)
    return lambda: all_of in space["filters"]


def _of_codecs() -> Callable[[], object]:
    look_up, names = codecs.lookup_error, ERRORS
    before = [look_up(name) for name in names]
    return lambda: [name for name, handler in zip(names, before, strict=True) if look_up(name) is not handler]


def _abstract() -> Callable[[], object]:
    spaces = (vars(collections.abc), vars(numbers))
    abstract = {name: x for space in spaces for name, x in space.items() if isinstance(x, type) and not name.startswith("_")}
    known, is_subclass = CLASSES, issubclass

    def said() -> list[str]:
        return [f"{name} of {one.__name__}" for name, x in abstract.items() for one in known if is_subclass(one, x)]

    before = frozenset(said())
    return lambda: sorted(before.symmetric_difference(said()))


def _pickled() -> Callable[[], object]:
    table, loaded = copyreg.dispatch_table, frozenset(sys.modules)
    known = dict(table)

    def others() -> list[str]:
        new = [(kind, how) for kind, how in [*table.items()] if known.get(kind) is not how]
        return sorted(kind.__qualname__ for kind, how in new if kind.__module__ in loaded and how.__module__ not in loaded)

    return others


def _patterns() -> Callable[[], object]:
    kept: list[Mapping[Any, Any]] = [found for name in ("_cache", "_cache2") if isinstance(found := getattr(re, name, None), dict)]
    kind = re.Pattern
    return lambda: sorted({
        str(key[1]) for cache in kept for key, made in [*cache.items()] if isinstance(made, kind) and made.pattern != key[1]
    })  # fmt: skip


def _sources() -> Callable[[], object]:
    """Return a function that says of which files ``linecache`` has other lines. It reads those that are new."""
    cache, stat, opened = linecache.cache, os.stat, open
    known = {name: entry for name, entry in cache.items() if len(entry) > 1}

    def is_forged(name: str, entry: Any) -> bool:
        try:
            if entry[1] is not None and entry[1] != stat(name).st_mtime:
                return False  # the file is a newer one
            with opened(name, encoding="utf-8") as file:
                return file.read().rstrip("\n") != "".join(entry[2]).rstrip("\n")
        except (OSError, ValueError, TypeError):
            return False

    def others() -> list[str]:
        new = [(name, entry) for name, entry in [*cache.items()] if len(entry) > 1 and known.get(name) is not entry]
        return sorted(name for name, entry in new if is_forged(name, entry))

    return others


def _of_compiler() -> Callable[[], object]:
    """Return a function that names the settings with another value than torch's own, by which it compiles for others too.

    Integers are limits, as of compilations.
    """
    kind, variable, watched = ConfigModule, ContextVar, (bool, float, str)

    def chosen(entry: Any) -> object:
        value = entry.user_override  # in a context variable from torch 2.12 on
        return value.get() if isinstance(value, variable) else value

    def others() -> list[str]:
        entries = [(name, x._config) for name, x in [*sys.modules.items()] if isinstance(x, kind)]
        found = [(f"{name}.{key}", chosen(x), x.default) for name, space in entries for key, x in [*space.items()]]
        return sorted(name for name, now, own in found if type(now) in watched and type(own) in watched and now != own)

    return others


def _loadable() -> Callable[[], object]:
    """Return a function that names what of Python itself ``torch.load`` of weights alone may call, such as ``os.system``.

    Packages add classes of their own, and harmless ones of Python, whose files they read.
    """
    said, modules, kind = torch.serialization.get_safe_globals, frozenset(sys.stdlib_module_names), type

    def others() -> list[str]:
        found = [x[0] if isinstance(x, tuple) else x for x in said()]
        names = [(getattr(x, "__module__", None) or "", getattr(x, "__qualname__", str(x)), isinstance(x, kind)) for x in found]
        roots = [(module.partition(".")[0], f"{module}.{name}", is_class) for module, name, is_class in names]
        return sorted(text for root, text, is_class in roots if root in modules and (not is_class or root == "subprocess"))

    return others


def _foreign() -> Callable[[], object]:
    """Return a function that names what others than Python, torch and numpy have put among modules that were loaded later.

    Those that are loaded now are compared with themselves.
    """
    folders = {os.path.join(os.path.realpath(x), "") for x in (sysconfig.get_paths()["stdlib"], os.path.dirname(os.__file__))}
    of_python, loaded, real = sys.stdlib_module_names, frozenset(sys.modules), os.path.realpath
    watched = (*folders, *PACKAGES)
    own = dict.fromkeys(of_python, (*watched, "<frozen ")) | dict.fromkeys(("torch", "numpy"), (*watched, "<"))
    function, module_kind = FunctionType, ModuleType

    def is_own(root: str, file: object) -> bool:
        return isinstance(file, str) and (file.startswith(own[root]) or real(file).startswith(own[root]))

    def others() -> Iterator[str]:
        for name, module in [*sys.modules.items()]:
            if name in loaded or (root := name.partition(".")[0]) not in own or module is None:
                continue
            spec = getattr(module, "__spec__", None) if isinstance(module, module_kind) else None
            origin = getattr(spec, "origin", None)
            if origin not in ("built-in", "frozen") and not is_own(root, origin):
                if name in of_python:
                    yield name
                continue  # torch's compiler makes modules of its own
            for key, value in [*vars(module).items()]:
                if type(value) is function and not is_own(root, value.__code__.co_filename):
                    yield f"{name}.{key}"

    return lambda: sorted(others())


def floats(functions: Iterable[tuple[str, str, Any]], spaces: Iterable[tuple[str, Mapping[str, Any]]]) -> Callable[[], list[str]]:
    """Return a function that names each number that is another one, though it is the same object.

    Args:
        functions: functions with the names of their owners and their own, whose defaults and constants are watched.
        spaces: variables of modules, and tables, with their names.
    """
    kept: dict[int, tuple[str, float, str]] = {}
    as_text, equal, whole = float.hex, str.__eq__, (tuple, CodeType)

    def keep(owner: str, name: str, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) is float:
                kept.setdefault(id(value), (f"{owner}.{name}", value, as_text(value)))
            elif type(value) in whole:
                keep(owner, name, value if type(value) is tuple else value.co_consts)

    for owner, name, function in functions:
        if type(function) is FunctionType:
            keep(owner, name, function.__code__.co_consts)
            keep(owner, name, function.__defaults__ or ())
            keep(owner, name, (function.__kwdefaults__ or {}).values())
    for owner, space in spaces:
        for name, value in space.items():
            keep(owner, name, (value,))
    known = [*kept.values()]
    return lambda: sorted(f"a number of {where}" for where, value, text in known if not equal(as_text(value), text))
