"""Commands as users see them: arguments, options and help. Each command imports the module that implements it when it runs."""

import dataclasses
import importlib
from collections.abc import Collection
from typing import get_args

import click

from ..operand_kinds import ModelDtype
from ..settings import Settings
from . import options
from .files import OutputFile
from .output import command
from .product import FiniteRange
from .proof_commands import PROOF_COMMANDS
from .store_commands import STORE_COMMANDS

TABLE_ROWS = 12
SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))


@command("tune.tune")
@options.shapes_options
@options.problem_options
@options.device_option
@options.devices_option
@options.ray_option
@options.search_options
@options.filter_options
@options.timing_option
@click.option("--m", "m_range", metavar="LO..HI", help="Tune a table for all these M instead of each shape's M.")
@click.option(
    "--batch-invariant", is_flag=True, help="Pick choices that sum K in one order, so that rows have equal bits in every batch."
)
@click.option("--force", is_flag=True, help="Measure choices again that are in the store.")
@click.option("--again", is_flag=True, help="Measure again what was measured on a busy machine; without SHAPE, all, tables too.")
@click.option("--wait-quiet", is_flag=True, help="Wait up to two minutes for a quiet machine before measuring.")
@click.option("--accept-busy", is_flag=True, help="Measure once on a busy machine, too. Results are marked all the same.")
@click.option(
    "--budget",
    "budget_s",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Seconds for all shapes. What is measured by then is kept and picked from; another tune goes on.",
)
@click.option("--recorded", metavar="FILE", type=click.Path(), help="A file of gemmtune record. Its heaviest problems come first.")
@click.option(
    "--rows", type=click.IntRange(min=0), default=TABLE_ROWS, show_default=True, help="Number of choices to show; 0 shows all."
)
def tune() -> None:
    """Find and store the fastest correct choice for each SHAPE.

    A SHAPE is MxNxK, or BxMxNxK for a batch: out[M, N] = a[M, K] @ b[K, N]. Stored results are not measured again. LO..HI instead
    of M makes a table with a choice for each M of the range. Calls within the range then never tune.

    \b
    gemmtune tune 16x4096x4096 --dtype bfloat16
    gemmtune tune 2048x6144x4096 --bias n --layout nt
    gemmtune tune --shapes models.json --json result.json
    gemmtune tune 1..8192x6144x4096 --dtype bfloat16
    gemmtune tune --recorded shapes.json
    gemmtune tune 16x8192x8192 --op mixed_mm --dtype float16 --scales group_128 --encoding int4
    gemmtune tune 512x512x511 --allow '^aten|_pad' --deny _k
    """


def _models() -> Collection[str]:
    """Return the names of the models. This imports torch."""
    return importlib.import_module("..fleet.models", __package__).MODELS  # type: ignore[no-any-return]


@command("fleet.fleet")
@options.shapes_options
@click.option("--recorded", metavar="FILE", type=click.Path(), help="A file of gemmtune record.")
@options.named(
    "--models", "NAMES", _models, "Public models whose weights to tune: all, or names such as llama-3.1-8b,qwen3-*.", several=True
)
@options.named(
    "--dtypes", "NAMES", get_args(ModelDtype), f"Dtypes of the weights of --models: some of {', '.join(get_args(ModelDtype))}.",
    several=True, default="bf16", show_default=True,
)  # fmt: skip
@click.option("--m", "m_range", metavar="LO..HI", help="Tune a table for all these M; 1..8192 for --models.")
@options.devices_option
@options.ray_option
@click.option("--dry-run", is_flag=True, help="Show the jobs, which are stored, and how long the others take. Measure nothing.")
@options.problem_options
@options.search_options
@options.filter_options
@options.timing_option
@click.option("--force", is_flag=True, help="Measure choices again that are in the store.")
@click.option("--again", is_flag=True, help="Measure again what was measured on a busy machine; without SHAPE, all, tables too.")
def fleet() -> None:
    """Tune many shapes or whole models on many GPUs at once.

    Each GPU measures one shape or one weight's table at a time, the longest first. A process or node that dies loses only the
    job that it runs, which is dealt again. Ctrl-C keeps what was measured, and the same command goes on from there. The exit
    status is 1 if a job failed.

    \b
    gemmtune fleet --models llama-3.1-8b --dtypes bf16,int4 --devices all --dry-run
    gemmtune fleet --models llama-3.1-8b --dtypes bf16,int4 --devices all
    gemmtune fleet --recorded shapes.json --devices 0,1
    gemmtune fleet --shapes models.json --ray auto
    """  # fmt: skip


@command("recording.record", context_settings={"ignore_unknown_options": True}, logs=False)
@click.option(
    "-o", "--output", "file", metavar="FILE", type=OutputFile(), default="shapes.json", show_default=True, help="The file to write."
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- PROGRAM [ARGUMENTS]...")
def record() -> None:
    """Run a Python program and record its GEMMs.

    Calls of torch and of gemmtune are recorded. tune --recorded reads the file.

    PROGRAM is a script, or python with a script or a module. It runs unchanged in this process, except that torch.compile leaves
    functions uncompiled. This command returns its exit status, and always writes the GEMMs recorded so far.

    \b
    gemmtune record -- python train.py --steps 10
    gemmtune record -o shapes.json -- python -m mypkg.generate
    """  # fmt: skip


@command("choices.choices")
@click.argument("shape")
@options.arch_option
@options.problem_options
@options.search_options
@options.filter_options
def choices() -> None:
    """List the choices that tuning SHAPE would try.

    The refused ones follow, with reasons.

    \b
    gemmtune choices 512x512x512 --arch sm80 --backends triton
    gemmtune choices 512x512x512 --arch sm90 --allow 'triton:mm_128x'
    """


@command("choices.explain")
@click.argument("shape")
@options.problem_options
@options.device_option
@options.search_options
@options.filter_options
@options.timing_option
def explain() -> None:
    """Show which choice a call of SHAPE runs, and why.

    The measured choices follow, with those that were refused or failed. Nothing is measured.

    \b
    gemmtune explain 16x4096x4096 --dtype bfloat16
    """


@command("build.build")
@options.shapes_options
@options.arch_option
@options.problem_options
@options.search_options
@options.filter_options
def build() -> None:
    """Compile ahead of time the kernels that tuning would compile.

    They go into the cache folder (GEMMTUNE_CACHE_DIR), and nothing runs. A machine with this cache folder and the same
    versions then tunes with the same search without compiling.

    \b
    gemmtune build 4096x4096x4096 --arch sm90 --backends triton,cutlass
    gemmtune build --shapes models.json --arch sm80 --search quick
    """


@command("doctor.doctor")
@click.option("--build", "build_native", is_flag=True, help="Compile the C++ look-up of warm calls if it is missing.")
def doctor() -> None:
    """Show what gemmtune finds here, and what is missing.

    It lists versions, devices, compilers, backends, the C++ look-up, the store and the cache folder. The exit
    status is 1 if --build fails, if no backend works on any device, or if the store or cache folder is unusable.
    """


@command("settings_table.show_settings", name="settings")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=options.complete_of(SETTINGS))
@click.option("--changed", is_flag=True, help="Leave out settings with their default.")
def show_settings() -> None:
    """Show the settings in force, and the source of each.

    The variable GEMMTUNE_<NAME> sets one, or a line in the table [tool.gemmtune] of the nearest pyproject.toml.

    \b
    gemmtune settings --changed
    gemmtune settings search timing
    """


@command("bundle.bundle")
@click.option(
    "-o",
    "--output",
    metavar="FILE.tar.gz|DIR",
    type=OutputFile(folders=True),
    default="gemmtune-bundle.tar.gz",
    show_default=True,
    help="The archive, or the new or empty folder, to write.",
)
def bundle() -> None:
    """Pack the store and kernels for a container image.

    The archive also has the C++ look-up, which is compiled if it is missing. Unpack it in the image, and set
    GEMMTUNE_CACHE_DIR to that folder. The folder may be read-only, and needs no compiler.

    \b
    gemmtune bundle
    gemmtune bundle --output image/gemmtune
    """


COMMANDS: tuple[click.Command, ...] = (
    tune, fleet, explain, record, choices, build, *STORE_COMMANDS, show_settings, doctor, bundle, *PROOF_COMMANDS,
)  # fmt: skip
