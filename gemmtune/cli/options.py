"""Options that several commands share, whose meaning is in ``asked``. Plain data, so that help needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from ..backends.table import BACKENDS
from ..settings import Search, Timing
from . import words

F = TypeVar("F", bound=Callable[..., Any])


class _WeightDtype(click.Choice[str]):
    """Name of a dtype of b. Four-bit numbers are an encoding instead."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in words.ENCODINGS:
            self.fail(f"got {value!r}, which is a way to pack b and not a dtype; give --encoding {value}", param, ctx)
        return super().convert(value, param, ctx)


arch_option = click.option(
    "--arch", metavar="ARCH", help=f"One of {', '.join(words.ARCHITECTURES)}; this machine's device by default."
)
"""Architecture for which the command answers."""
shapes_argument = click.argument("shapes", nargs=-1, metavar="[SHAPE]...")
shapes_option = click.option("--shapes", "shapes_file", metavar="FILE", help="A JSON file with a list of shapes.")
device_option = click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; by default cuda if there is a GPU.")
timing_option = click.option(
    "--timing",
    type=click.Choice(get_args(Timing)),
    help="graph: kernel time alone; spaced: between other kernels; eager: with the host's cost.",
)


def problem_options(function: F) -> F:
    """Add the options that apply to every shape of the command line."""
    return _all(
        function,
        click.option("--op", type=click.Choice(words.OPS), help="Operation; by default mm, or bmm for BxMxNxK."),
        click.option(
            "--dtype", type=click.Choice(words.DTYPES),
            help="Dtype of a, and of a dense b; by default bfloat16, int8 for int_mm and float8_e4m3fn for scaled_mm.",
        ),
        click.option(
            "--layout", type=click.Choice(words.LAYOUTS), default="nt", show_default=True,
            help="BLAS letters of a and b: n is row-major, t column-major, so nt stores b like an nn.Linear weight.",
        ),
        click.option(
            "--bias", type=click.Choice(words.BIASES),
            help="Shape of the added operand; makes the operation addmm or baddbmm, except for scaled_mm.",
        ),
        click.option("--alpha", type=float, default=1.0, help="Factor of the product (addmm, baddbmm)."),
        click.option("--beta", type=float, help="Factor of the added operand (addmm, baddbmm)."),
        click.option("--k2", type=click.IntRange(min=0), help="Columns of c; by default K (mm_plus_mm)."),
        click.option("--prepacked", is_flag=True, help="b is packed by gemmtune.prepack (not for batches)."),
        click.option(
            "--dtype-b", type=_WeightDtype(words.B_DTYPES),
            help="Dtype of b; by default int8 (mixed_mm; uint8 with --encoding), or that of a (scaled_mm).",
        ),
        click.option("--encoding", type=click.Choice(words.ENCODINGS), help="b has two 4-bit numbers in each byte (mixed_mm)."),
        click.option(
            "--scales", type=click.Choice(words.SCALES), metavar="KIND",
            help=f"Part of an operand that shares a scale. scaled_mm:  {', '.join(words.SCALES_OF_SCALED_MM)}; mixed_mm: "
            f"{', '.join(words.SCALES_OF_WEIGHTS)}; int_mm_mul: {', '.join(words.FACTORS)}.",
        ),
        click.option("--zeros", is_flag=True, help="b has zero points in the shape of its scales (mixed_mm)."),
        click.option("--scale-dtype", type=click.Choice(words.RESULT_DTYPES), help="Dtype of the scales (int_mm_mul, mixed_mm)."),
        click.option("--out-dtype", type=click.Choice(words.RESULT_DTYPES), help="Dtype of the result (int_mm_mul, scaled_mm)."),
        click.option("--block", metavar="SIDE", help="Side of the blocks of bsr, or ROWSxCOLUMNS; by default 64 (bsr_mm)."),
        click.option("--density", type=click.FloatRange(0, 1), help="Share of the blocks that exist; by default 0.5 (bsr_mm)."),
        click.option("--imbalance", type=click.Choice(words.IMBALANCES), help="Spread of the blocks over rows of bsr (bsr_mm)."),
        click.option("--groups", type=click.IntRange(1), help="Groups of rows, or of terms; by default 8 (grouped_mm)."),
        click.option("--gated", type=click.Choice(words.GATES), help="Half of b's columns are gates (routed_grouped_mm)."),
        click.option(
            "--tokens", type=click.IntRange(1),
            help="Rows of a, from which an index picks M (routed_grouped_mm); rows of the sum of M rows (combined_grouped_mm).",
        ),
        click.option("--fast-accum", is_flag=True, help="8-bit tensor cores may keep their narrow sum (scaled_mm)."),
    )  # fmt: skip


def search_options(function: F) -> F:
    """Add the options that select what is tried."""
    return _all(
        function,
        click.option(
            "--backends", metavar="NAMES",
            help=f"Comma-separated names of {', '.join(BACKENDS)}; by default all that serve the device.",
        ),
        click.option("--search", type=click.Choice(get_args(Search)), help="How many configs each template offers."),
        click.option(
            "--with", "extra_choices", multiple=True, metavar="MODULE:FUNCTION",
            help="Your own GEMM to include, such as mylib.ops:matmul; may be given several times.",
        ),
    )  # fmt: skip


def filter_options(function: F) -> F:
    """Add the options that restrict which choices may be tried."""
    return _all(
        function,
        click.option(
            "--allow", "choice_allowlist_regex", metavar="REGEX",
            help="Try only choices whose name matches REGEX (re.search).",
        ),
        click.option(
            "--deny", "choice_denylist_regex", metavar="REGEX",
            help="Try no choice whose name matches REGEX; wins over --allow.",
        ),
    )  # fmt: skip


def _all(function: F, *decorators: Callable[[F], F]) -> F:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
