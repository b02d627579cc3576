"""Commands about stores as users see them: arguments, options and help."""

from typing import get_args

import click

from ..settings import Search
from .files import OutputFile
from .options import selection_options
from .output import SUBCOMMAND, command, help_if_alone, level_options
from .product import FiniteRange

MOST_DAYS = 36_500
"""Largest age of a measurement for which one can ask."""


@command("stores.show")
@selection_options
@click.option(
    "--rows", type=click.IntRange(min=1), default=3, show_default=True, help="Number of choices to show for each problem."
)
def show() -> None:
    """Show what the store knows of each problem, by machine.

    It prints the pick and the next best choices. Without a condition it prints all problems.

    \b
    gemmtune show 16x4096x4096
    gemmtune show --match 'mm .* bfloat16' --here
    """


@command("report.report")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path())
@click.option("--html", metavar="FILE", type=OutputFile(), help="Write one page without external resources.")
@click.option("--md", metavar="FILE", type=OutputFile(), help="Write Markdown, for instance for a pull request.")
@click.option("--png", metavar="FILE", type=OutputFile(), help="Write a picture (needs matplotlib).")
@click.option("--replay", "replayed", is_flag=True, help="Add a section about searches, replayed on the measurements, to the page.")
def report() -> None:
    """Show what was measured, as a page, Markdown or picture.

    A FILE is a store, an export of one, or a result of tune --json or of the project's benchmark. The default is the store
    in force. Of two files the second is compared with the first. Without an option, Markdown is printed.

    \b
    gemmtune report --html report.html
    gemmtune report before.json after.json --html report.html
    """


@command("report.replay_store")
@click.argument("file", required=False, metavar="[FILE]", type=click.Path())
@click.option("--search", type=click.Choice(get_args(Search)), multiple=True, help="A search to replay; default: quick, default.")
@click.option(
    "--order",
    type=click.Choice(("tuning", "ranked", "random")),
    multiple=True,
    help="An order of trial: tune's own, backend by backend, or random; default: the first two.",
)
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, help="Replay one problem in so many.")
def replay() -> None:
    """Replay searches on stored measurements.

    FILE is a store or an export of one, by default the store in force. The table has the regret of each search, by order of
    trial and number of measured choices. Regret is the time of the best choice found ÷ that of the best stored one, less one.

    \b
    gemmtune replay
    gemmtune replay export.json --search default --order tuning --order random
    """


@command("stores.export_store", name="export")
@click.argument("file", metavar="FILE", type=OutputFile(stdout=True, folders=True))
@selection_options
@click.option(
    "--format",
    "file_format",
    type=click.Choice(("gemmtune", "t4", "inductor", "tunableop", "moe")),
    default="gemmtune",
    show_default=True,
    help="gemmtune: JSON that import reads; t4: other auto-tuners; inductor: Inductor's look-up table; tunableop: CSV of torch's "
    "TunableOp; moe: FILE is a folder for vLLM's and SGLang's configs of experts.",
)
def export_store() -> None:
    """Write the store, or some of its problems, to FILE.

    FILE may be - for standard output. import reads the default format. Other formats are for other tools.

    \b
    gemmtune export store.json
    gemmtune export table.json --format inductor --here
    gemmtune export one.json 16x4096x4096 --format t4
    """


@command("stores.import_store", name="import")
@click.argument("file", metavar="FILE", type=click.Path())
def import_store() -> None:
    """Merge a file of export, or another store, into the store.

    If both have a choice, the later measurement stays. FILE may be - for standard input.
    """


@command("stores.import_store")
@click.argument("file", metavar="OTHER_STORE", type=click.Path())
def merge() -> None:
    """Merge another store, an SQLite file, into the store.

    If both have a choice, the later measurement stays.
    """


@command("report.diff")
@click.argument("before", type=click.Path())
@click.argument("after", type=click.Path())
@click.option("--all", "every", is_flag=True, help="Show problems with equal picks and times too.")
def diff() -> None:
    """Compare the picks of two stores or results.

    Each side is a store, a file of export, or one of tune --json. Machines are compared by device, threads and timing mode, so
    that the sides may differ in versions. Where a side names no machine, the latest measurement of a problem counts.

    \b
    gemmtune diff before.json after.json
    gemmtune diff old/store.sqlite new/store.sqlite --all
    """


@click.group(invoke_without_command=True, subcommand_metavar=SUBCOMMAND)
@level_options
@click.pass_context
def store(context: click.Context) -> None:
    """Find the store, and remove measurements from it."""
    help_if_alone(context)


dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what would be removed.")


@command("stores.path", group=store)
def path() -> None:
    """Print the path of the store's file."""


@command("stores.forget", group=store)
@selection_options
@click.option("--all", "every", is_flag=True, help="Forget everything.")
@dry_run_option
def forget() -> None:
    """Remove the measurements of problems.

    The tables of their weights for every M go too. The next tuning measures them again.

    \b
    gemmtune store forget 16x4096x4096
    gemmtune store forget --match '^bmm ' --dry-run
    """


@command("stores.prune", group=store)
@click.option("--older", type=FiniteRange(min=0, max=MOST_DAYS), metavar="DAYS", help="Remove also what is older, of any machine.")
@dry_run_option
def prune() -> None:
    """Remove what an update has made useless.

    These are measurements of this machine's devices under other versions of torch, Triton, CUDA or the driver. Rows and tables of
    kernels that this version of gemmtune no longer has go too, and problems and tables that it cannot read. Measurements of other
    machines stay.
    """


STORE_COMMANDS: tuple[click.Command, ...] = (show, report, replay, export_store, import_store, merge, diff, store)
