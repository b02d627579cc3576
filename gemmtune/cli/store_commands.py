"""Commands about stores as users see them: arguments, options and help."""

from typing import Any, get_args

import click

from ..settings import Search
from .options import selection_options
from .output import SUBCOMMAND, help_if_alone, level_options, output_options, run
from .product import FiniteRange

MOST_DAYS = 36_500
"""Largest age of a measurement for which one can ask."""


@click.command()
@selection_options
@click.option(
    "--rows", type=click.IntRange(min=1), default=3, show_default=True, help="Number of choices to show for each problem."
)
@output_options
def show(**given: Any) -> None:
    """Show what the store knows of each problem, by machine.

    It prints the pick and the next best choices. Without a condition it prints all problems.

    \b
    gemmtune show 16x4096x4096
    gemmtune show --match 'mm .* bfloat16' --here
    """
    run("stores.show", given)


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path())
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write one page without external resources.")
@click.option("--md", metavar="FILE", type=click.Path(dir_okay=False), help="Write Markdown, for instance for a pull request.")
@click.option("--png", metavar="FILE", type=click.Path(dir_okay=False), help="Write a picture (needs matplotlib).")
@click.option("--replay", "replayed", is_flag=True, help="Add a section about searches, replayed on the measurements, to the page.")
@output_options
def report(**given: Any) -> None:
    """Show what was measured, as a page, Markdown or picture.

    A FILE is a store, an export of one, or a result of tune --json or of the project's benchmark. The default is the store
    in force. Of two files the second is compared with the first. Without an option, Markdown is printed.

    \b
    gemmtune report --html report.html
    gemmtune report before.json after.json --html report.html
    """
    run("report.report", given)


@click.command()
@click.argument("file", required=False, metavar="[FILE]", type=click.Path())
@click.option("--search", type=click.Choice(get_args(Search)), multiple=True, help="A search to replay; default: quick, default.")
@click.option(
    "--order",
    type=click.Choice(("tuning", "ranked", "random")),
    multiple=True,
    help="An order of trial: tune's own, backend by backend, or random; default: the first two.",
)
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, help="Replay one problem in so many.")
@output_options
def replay(**given: Any) -> None:
    """Replay searches on stored measurements.

    FILE is a store or an export of one, by default the store in force. The table has the regret of each search, by order of
    trial and number of measured choices. Regret is the time of the best choice found ÷ that of the best stored one, less one.

    \b
    gemmtune replay
    gemmtune replay export.json --search default --order tuning --order random
    """
    run("report.replay_store", given)


@click.command("export")
@click.argument("file", metavar="FILE", type=click.Path())
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
@output_options
def export_store(**given: Any) -> None:
    """Write the store, or some of its problems, to FILE.

    import reads the default format. Other formats are for other tools.

    \b
    gemmtune export store.json
    gemmtune export table.json --format inductor --here
    gemmtune export one.json 16x4096x4096 --format t4
    """
    run("stores.export_store", given)


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path())
@output_options
def import_store(**given: Any) -> None:
    """Merge a FILE that export wrote, or another store, into the store.

    If both have a choice, the later measurement stays.
    """
    run("stores.import_store", given)


@click.command()
@click.argument("file", metavar="OTHER_STORE", type=click.Path())
@output_options
def merge(**given: Any) -> None:
    """Merge another store, an SQLite file, into the store.

    If both have a choice, the later measurement stays.
    """
    run("stores.import_store", given)


@click.command()
@click.argument("before", type=click.Path())
@click.argument("after", type=click.Path())
@click.option("--all", "every", is_flag=True, help="Show problems with equal picks and times too.")
@output_options
def diff(**given: Any) -> None:
    """Compare the picks of two stores or results.

    Each side is a store, a file of export, or one of tune --json. Machines are compared by device, threads and timing mode, so
    that the sides may differ in versions. Where a side names no machine, the latest measurement of a problem counts.

    \b
    gemmtune diff before.json after.json
    gemmtune diff old/store.sqlite new/store.sqlite --all
    """
    run("report.diff", given)


@click.group(invoke_without_command=True, subcommand_metavar=SUBCOMMAND)
@level_options
@click.pass_context
def store(context: click.Context) -> None:
    """Find the store, and remove measurements from it."""
    help_if_alone(context)


dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what would be removed.")


@store.command()
@output_options
def path(**given: Any) -> None:
    """Print the path of the store's file."""
    run("stores.path", given)


@store.command()
@selection_options
@click.option("--all", "every", is_flag=True, help="Forget everything.")
@dry_run_option
@output_options
def forget(**given: Any) -> None:
    """Remove the measurements of problems.

    The tables of their weights for every M go too. The next tuning measures them again.

    \b
    gemmtune store forget 16x4096x4096
    gemmtune store forget --match '^bmm ' --dry-run
    """
    run("stores.forget", given)


@store.command()
@click.option("--older", type=FiniteRange(min=0, max=MOST_DAYS), metavar="DAYS", help="Remove also what is older, of any machine.")
@dry_run_option
@output_options
def prune(**given: Any) -> None:
    """Remove what an update has made useless.

    These are measurements of this machine's devices under other versions of torch, Triton, CUDA or the driver. Problems that
    this version of gemmtune cannot read go too. Measurements of other machines stay.
    """
    run("stores.prune", given)


STORE_COMMANDS: tuple[click.Command, ...] = (show, report, replay, export_store, import_store, merge, diff, store)
