"""Options that several commands share, whose meaning is in ``asked``. Plain data, so that help needs no torch."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from ..backends.table import BACKENDS
from ..settings import Search, Timing
from . import words
from .completion import complete_gemm, complete_of
from .product import click_options

F = TypeVar("F", bound=Callable[..., Any])
arch_option = click.option(
    "--arch",
    metavar="ARCH",
    shell_complete=complete_of(words.ARCHITECTURES),
    help=f"One of {', '.join(words.ARCHITECTURES)}; this machine's device by default.",
)
"""Architecture for which the command answers."""
shapes_argument = click.argument("shapes", nargs=-1, metavar="[SHAPE]...")
shapes_option = click.option(
    "--shapes", "shapes_file", metavar="FILE", type=click.Path(), help="A JSON file with a list of shapes."
)
device_option = click.option(
    "--device",
    metavar="DEVICE",
    shell_complete=complete_of(words.DEVICES),
    help="cpu, cuda or cuda:N; by default cuda if there is a GPU.",
)
devices_option = click.option(
    "--devices",
    metavar="DEVICES",
    shell_complete=complete_of(words.SEVERAL_DEVICES),
    help="Devices to tune on at once: all GPUs of this host, their numbers such as 0,1, or cpu.",
)
ray_option = click.option(
    "--ray",
    metavar="ADDRESS",
    shell_complete=complete_of(("auto",)),
    help="Tune on the GPUs of a Ray cluster: auto, or its address. Needs the extra gemmtune[fleet].",
)
timing_option = click.option(
    "--timing",
    type=click.Choice(get_args(Timing)),
    help="graph: kernel time alone; spaced: between other kernels; eager: with the host's cost.",
)


def selection_options(function: F) -> F:
    """Add the options that select problems of the store."""
    return _all(
        function,
        shapes_argument,
        click.option(
            "--match", metavar="REGEX", help="Only problems whose text matches REGEX (re.search), such as '^bmm .* float16'."
        ),
        click.option("--here", is_flag=True, help="Only measurements that count on this machine."),
    )


def problem_options(function: F) -> F:
    """Add the options that apply to every shape of the command line."""
    return _all(function, *click_options())


def search_options(function: F) -> F:
    """Add the options that select what is tried."""
    return _all(
        function,
        click.option(
            "--backends", metavar="NAMES", shell_complete=complete_of(BACKENDS, several=True),
            help=f"Comma-separated names of {', '.join(BACKENDS)}; by default all that serve the device.",
        ),
        click.option("--search", type=click.Choice(get_args(Search)), help="How many configs each template offers."),
        click.option(
            "--with", "extra_choices", multiple=True, metavar="MODULE:FUNCTION", shell_complete=complete_gemm,
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
