"""Meaning of the options that several commands share: a device, and changes of the settings."""

import re
from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from .. import settings
from ..backends.own.targets import loaded
from ..backends.table import check_names
from ..declaration.named import importable
from ..device import DeviceInfo, detect, preset
from ..errors import DISABLED, SettingsError, UnavailableError, raised_as
from ..settings import Settings, given
from ..tuning.brought import surviving

_OPTIONS = {
    "backends": "--backends",
    "search": "--search",
    "extra_choices": "--with",
    "choice_allowlist_regex": "--allow",
    "choice_denylist_regex": "--deny",
    "timing": "--timing",
}
"""Options that stand for settings, by setting name."""


def device_of(text: str | None) -> DeviceInfo:
    """Return the device of ``--device``, by default the current GPU if there is one, else the CPU.

    Raises click.UsageError if the text names no device, and UnavailableError if this machine does not have it.
    """
    if text is not None and not re.fullmatch(r"cpu|cuda(:\d{1,4})?", text):
        raise click.UsageError(f"--device: got {text!r}, expected cpu, cuda or cuda:N, for instance cuda:1")
    return detect(text)


def arch_of(text: str | None) -> DeviceInfo | None:
    """Return the architecture of ``--arch``, or None if it is missing. Raises click.UsageError for an unknown one."""
    with raised_as(click.UsageError, UnavailableError, before="--"):
        return None if text is None else preset(text)


def refuse_if_disabled() -> None:
    """Raise click.UsageError where the settings disable gemmtune."""
    if given().disable:
        raise click.UsageError(f"{DISABLED}: this command has nothing to choose from; unset it first")


def refuse_problem_options(options: Iterable[str]) -> None:
    """Raise click.UsageError if an option of problems is on the command line, which has no shapes."""
    context = click.get_current_context()
    for name in options:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{name.replace('_', '-')}: got no shapes for this option, expected MxNxK, BxMxNxK or --shapes FILE"
            )


def settings_changes(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that stand for settings from ``options``, and return the given ones as changes for ``settings.patch``.

    Raises click.UsageError if a setting does not accept the value, or a GEMM of ``--with`` cannot be imported.
    """
    changes = {name: value for name in _OPTIONS if (value := options.pop(name, None)) not in (None, ())}
    if "backends" in changes:
        changes["backends"] = tuple(word.strip() for word in changes["backends"].split(",") if word.strip())
    with raised_as(click.UsageError, before="--with: "):
        changes |= {"extra_choices": tuple(map(importable, changes["extra_choices"]))} if "extra_choices" in changes else {}
    for name, value in changes.items():
        try:
            check_names(Settings(**{name: value}).backends or ())
        except SettingsError as error:
            raise click.UsageError(f"{_OPTIONS[name]}: {str(error).partition(': ')[2]}") from error
    asked = changes.get("extra_choices", ())
    targets = asked or settings.current().extra_choices or ()
    if targets and settings.current().tune_in_subprocess:
        targets = surviving(targets)
        changes["extra_choices"] = targets or None
    for target in targets if asked else ():
        with raised_as(click.UsageError, before="--with: "):
            loaded(target)
    return changes
