"""The command line, as click has it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import click

from gemmtune.cli import cli
from gemmtune.cli.sections import EVERY, GEMM, OWN, SEARCH, by_section
from gemmtune.cli.words import OPS

from . import ANY_OPERATION, table

FEW = 6
"""Number of shared options up to which a command lists their names."""


def found_in(group: click.Group, before: str = "") -> dict[str, click.Command]:
    """Return the commands of a group and of the groups within it, by their words."""
    found: dict[str, click.Command] = {}
    for name, command in sorted(group.commands.items()):
        inner = isinstance(command, click.Group)
        found |= found_in(command, f"{before}{name} ") if inner else {before + name: command}
    return found


SUBCOMMANDS = found_in(cli)


def command_table() -> str:
    """Return what each command does, in a sentence."""
    rows = [[f"[`gemmtune {name}`](#gemmtune-{name.replace(' ', '-')})", sentence(x)] for name, x in SUBCOMMANDS.items()]
    return table(["command", "effect"], rows)


def sentence(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    text = " ".join((command.help or "").replace("\b", "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0]


def every_command() -> str:
    """Return a section for each command: its help, its arguments and its options."""
    return "\n".join(section(name) for name in SUBCOMMANDS)


def section(name: str) -> str:
    """Return the section of one command."""
    command = SUBCOMMANDS[name]
    context = click.Context(command, info_name=f"gemmtune {name}")
    usage = command.get_usage(context).removeprefix("Usage: ")
    help_text = "\n\n".join(paragraph(part) for part in (command.help or "").split("\n\n"))
    options = by_section(command.get_params(context))
    own = [options_table(options[OWN], context).strip()] if OWN in options else []
    shared = [f"- [{heading}](#{anchor(heading)}): {names(options[heading])}" for heading in (SEARCH, GEMM) if heading in options]
    parts = [f"## gemmtune {name}", f"```text\n{' '.join(usage.split())}\n```", help_text, *own, "\n".join(shared)]
    return "\n\n".join(filter(None, parts)) + "\n"


def shared_options() -> str:
    """Return the options that several commands share, below their headings. ``tune`` has all of them."""
    context = click.Context(SUBCOMMANDS["tune"], info_name="gemmtune tune")
    options = by_section(SUBCOMMANDS["tune"].get_params(context))
    return "\n".join(f"### {heading}\n\n{options_table(options[heading], context)}" for heading in (EVERY, SEARCH, GEMM))


def options_table(options: list[click.Option], context: click.Context) -> str:
    """Return a table of options."""
    return table(["option", "value", "meaning"], [row(option, context) for option in options if "--help" not in option.opts])


def anchor(heading: str) -> str:
    """Return the link of a heading within its page."""
    return heading.lower().replace(" ", "-")


def names(options: list[click.Option]) -> str:
    """Return the names of a few options; of many, that they are those of all commands."""
    return ", ".join(f"`{option.opts[0]}`" for option in options) if len(options) <= FEW else "all"


def paragraph(text: str) -> str:
    """Return a paragraph of help; examples, which click keeps as they are, become a block."""
    if "\b" in text:
        return "```text\n" + "\n".join(line.strip() for line in text.replace("\b", "").strip().splitlines()) + "\n```"
    return textwrap.fill(" ".join(text.split()), 100)


def row(option: click.Option, context: click.Context) -> list[str]:
    """Return name, values and meaning of an option."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if isinstance(option.type, click.Choice) and tuple(option.type.choices) == OPS:
        value = ANY_OPERATION
    elif isinstance(option.type, click.Choice):
        value = ", ".join(f"`{choice}`" for choice in option.type.choices)
    elif option.is_flag or option.count:
        value = ""
    else:
        value = f"`{option.make_metavar(context)}`"
    record = option.get_help_record(context)
    return [names, value, record[1] if record else ""]


MAKERS: dict[str, Callable[[], str]] = {
    "commands": command_table,
    "command-sections": every_command,
    "shared-options": shared_options,
}
