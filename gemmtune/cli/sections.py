"""Sections of options in help. Options that many commands share stand below headings of their own, after the command's."""

from collections.abc import Iterable
from typing import Any

import click

OWN = "Options"
SEARCH = "Options of the search"
GEMM = "Options of the GEMM"
EVERY = "Options of every command"


class SharedOption(click.Option):
    """Option that stands below a heading in help."""

    def __init__(self, *names: Any, section: str, **more: Any) -> None:
        """Make an option of click, with the heading ``section``."""
        super().__init__(*names, **more)
        self.section = section


class SectionedCommand(click.Command):
    """Command whose help has sections of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of options that the command has."""
        for heading, options in by_section(self.get_params(ctx)).items():
            with formatter.section(heading):
                formatter.write_dl([record for option in options if (record := option.get_help_record(ctx))])


def by_section(parameters: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """Return the options of a command by their headings, in the order of help."""
    found: dict[str, list[click.Option]] = {OWN: [], SEARCH: [], GEMM: [], EVERY: []}
    for option in parameters:
        if isinstance(option, click.Option):
            shared = EVERY if "--help" in option.opts else OWN
            found[option.section if isinstance(option, SharedOption) else shared].append(option)
    return {heading: options for heading, options in found.items() if options}
