"""Types of settings: the legal values of a field, and the reading of a variable or of a line of TOML."""

import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from .errors import SettingsError
from .foreign import shown
from .regex import compiled

Rows = Literal["shared", "exact"]
MixedMmChoice = Literal["default", "triton", "aten", "heuristic"]
AbsentBlocks = Literal["any", "skipped"]
Busy = Literal["repeat", "wait", "accept"]
Plugin = Literal["0", "1", "all"]
MOST = 10**12
"""Largest number of a setting. Timers of the system take no more seconds."""


def _check_regex(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise SettingsError(f"{field}: got {value!r}, expected a regular expression as text, or None")
    try:
        compiled(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingsError(
            f"{field}: got {shown(value)}, expected a regular expression of Python's re module ({error}); "
            "put a backslash before a literal special character"
        ) from error
    except ValueError as error:
        raise SettingsError(f"{field}: got {shown(value)}, expected a regular expression that matches quickly; {error}") from error


def _check_targets(field: str, value: Any) -> None:
    for target in value:
        if not isinstance(target, str) or not target.partition(":")[0].strip() or target.partition(":")[0] == "__main__":
            raise SettingsError(
                f"{field}: got {target!r}, expected package.module:function, for instance mylib.ops:matmul, or such a function "
                "itself; worker processes import it, so it has to be in a module instead of the main program"
            )


def _check_names(field: str, value: Any) -> None:
    for name in value:
        if not isinstance(name, str):
            raise SettingsError(f"{field}: got {shown(name)}, expected names of backends as texts")
    if not value:
        raise SettingsError(f"{field}: got nothing, expected at least one name of the table of backends, or None for all")


def _check_file(field: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike):
        raise SettingsError(f"{field}: got {value!r}, expected a path as text, or None")


def _at_least(least: float, otherwise: str = "") -> Callable[[str, object], None]:
    kinds, name = (int, "whole number") if isinstance(least, int) else ((int, float), "number")

    def check_number(field: str, value: object) -> None:
        if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= MOST:
            most = f" and at most {MOST}" if isinstance(value, kinds) and value > MOST else ""
            raise SettingsError(f"{field}: got {shown(value)}, expected a {name} of at least {least}{most}{otherwise}")

    return check_number


Names = Annotated[tuple[str, ...] | None, _check_names]
Targets = Annotated[tuple[str, ...] | None, _check_targets]
Regex = Annotated[str | None, _check_regex]
Natural = Annotated[int, _at_least(0)]
Place = Annotated[int | None, _at_least(0, ", or None")]
Most = Annotated[int | None, _at_least(1, ", or None")]
Seconds = Annotated[float, _at_least(0.1)]
Budget = Annotated[float | None, _at_least(0.1, ", or None")]
File = Annotated[str | None, _check_file]
"""Path of a file or folder."""


def check(field: str, hint: Any, value: object) -> None:
    """Raise SettingsError for a value that a field with this type hint does not accept."""
    kind, *checks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise SettingsError(f"{field}: got {value!r}, expected one of {', '.join(get_args(kind))}")
    if kind is bool and not isinstance(value, bool):
        raise SettingsError(f"{field}: got {value!r}, expected True or False")
    if value is not None and not isinstance(value, tuple) and any(get_origin(x) is tuple for x in get_args(kind)):
        raise SettingsError(f"{field}: got {value!r}, expected a list of texts, or None")
    if value is not None or types.NoneType not in get_args(kind):
        for one in checks:
            one(field, value)


@contextmanager
def blamed_on(source: str, field: str) -> Iterator[None]:
    """Begin an error about a field with the source of its value."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{source}: {str(error).removeprefix(f'{field}: ')}") from None


def parse(text: str, hint: Any) -> object:
    """Parse the text of an environment variable. Raises SettingsError for an invalid number or boolean."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    kinds = get_args(kind) or (kind,)
    if not text and types.NoneType in kinds:
        return None
    if bool in kinds:
        if text.lower() not in ("0", "1", "false", "true"):
            raise SettingsError(f"got {text!r}, expected 0 or 1")
        return text.lower() in ("1", "true")
    for number, name in ((int, "a whole number"), (float, "a number")):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                raise SettingsError(f"got {text!r}, expected {name}") from None
    if any(get_origin(x) is tuple for x in kinds):
        return tuple(word.strip() for word in text.split(",") if word.strip()) or None
    return text


def from_toml(value: object, hint: Any, folder: Path) -> object:
    """Return a value of a TOML file as a field takes it: lists are tuples, and paths are relative to the file's ``folder``."""
    if hint == File and isinstance(value, str) and value:
        return str(folder / Path(value).expanduser())
    return tuple(value) if isinstance(value, list) else value


def target_of(value: object) -> object:
    """Return the import path of a function, class or module as text, and any other value unchanged."""
    if isinstance(value, str):
        return value
    if inspect.ismodule(value):
        return value.__name__
    module, name, short = (getattr(value, f"__{word}__", None) for word in ("module", "qualname", "name"))
    if isinstance(short, str) and getattr(sys.modules.get(module or ""), short, None) is value:
        name = short  # torch.mm has a qualified name of a class that torch does not export
    return value if module is None or name is None or "<" in name else f"{module}:{name}"
