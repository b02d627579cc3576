"""Command line: ``gemmtune COMMAND``. ``commands.COMMANDS`` lists them.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 ended by SIGTERM.
"""

import errno
import os
import re
import sys
from collections.abc import Sequence

import click

from ..errors import GemmtuneError
from ..version import __version__
from .commands import COMMANDS
from .output import SUBCOMMAND, help_if_alone, interruption, level_options, note, seal_stdout, status_of, warnings_as_lines

__all__ = ["cli", "main", "run"]

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full disk or a limit, without a file's name where standard output is meant."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True, subcommand_metavar=SUBCOMMAND)
@level_options
@click.version_option(__version__, prog_name="gemmtune")
@click.pass_context
def cli(context: click.Context) -> None:
    """Find the fastest correct GEMM for a shape on this machine, remember it, and prove it.

    Settings that have no option here are GEMMTUNE_* environment variables or lines of pyproject.toml: see gemmtune settings.
    """
    help_if_alone(context)


for command in COMMANDS:
    cli.add_command(command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (None: that of the process) and return its exit status."""
    with warnings_as_lines():
        try:
            status = cli.main(args=None if arguments is None else list(arguments), prog_name="gemmtune", standalone_mode=False)
        except click.ClickException as error:
            if isinstance(error, click.UsageError) and error.ctx is not None:
                note(error.ctx.get_usage())
            message = error.format_message()
            if isinstance(error, click.NoSuchOption) and re.match(r"-\d", error.option_name):
                message = f"shape: got one that begins with {error.option_name!r}, expected whole numbers, such as 16x4096x4096"
            note(f"error: {message}")
            return error.exit_code
        except OSError as error:
            if error.errno not in UNWRITABLE or error.filename is not None:
                raise
            note(f"error: standard output: got {error.strerror}, expected to write the result there")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rest of its buffer has nowhere to go
            return 1
        except GemmtuneError as error:
            note(f"error: {error}")
            return 1
        except click.Abort as end:
            note(interruption(end.__cause__))
            return status_of(end.__cause__)
    return status if isinstance(status, int) else 0


def _open_closed_streams() -> None:
    """Open the null device for closed standard streams. Else the next file that is opened, such as the store, has their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w", closefd=False))


def main() -> None:
    """Run the ``gemmtune`` command."""
    _open_closed_streams()
    status = run()
    seal_stdout()
    sys.exit(status)
