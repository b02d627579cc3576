"""``gemmtune settings``: the settings in force, with the source of each. Needs no torch."""

import dataclasses
from collections.abc import Sequence

import click

from .. import settings
from ..settings import ENVIRONMENT_PREFIX, Settings
from .files import STDOUT
from .output import write_json


def show_settings(names: Sequence[str], changed: bool, json_file: str | None) -> None:
    """Print the named settings, or all. With ``changed``, leave out defaults. Raises click.UsageError for a name of no setting."""
    known = [field.name for field in dataclasses.fields(Settings)]
    wanted = [name.lower().removeprefix(ENVIRONMENT_PREFIX.lower()) for name in names]
    for name in wanted:
        if name not in known:
            raise click.UsageError(f"settings: got {name!r}, expected names out of {', '.join(known)}")
    sources, now = settings.sources(), settings.current()
    shown = [name for name in wanted or known if not changed or sources[name] != settings.DEFAULT]
    values = {name: getattr(now, name) for name in shown}
    if json_file != STDOUT:
        widths = [max(map(len, column), default=0) for column in (shown, [repr(x) for x in values.values()])]
        for name, value in values.items():
            click.echo(f"{name:{widths[0]}}  {value!r:{widths[1]}}  {sources[name]}")
        if not shown:
            click.echo("nothing differs from the defaults")
    write_json(json_file, {name: {"value": value, "source": sources[name]} for name, value in values.items()})
