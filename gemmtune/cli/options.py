"""Options that several commands share, whose meaning is in ``asked``. Plain data, so that help needs no torch."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from ..backends.table import BACKENDS
from ..settings import Search, Timing
from . import words
from .product import click_options
from .sections import SEARCH, SharedOption

F = TypeVar("F", bound=Callable[..., Any])
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
_SEARCH: dict[str, Any] = {"cls": SharedOption, "section": SEARCH}
Legal = Collection[str] | Callable[[], Collection[str]]
"""Words, or a function that returns them because their import takes long."""


def complete_of(words: Legal, *, several: bool = False) -> Complete:
    """Return the completion of a word of a list, or with ``several`` of the last of words that are joined by commas."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001 - click's
        *before, last = incomplete.split(",") if several else [incomplete]
        given = "".join(f"{word}," for word in before)
        known = words() if callable(words) else words
        return [CompletionItem(given + word) for word in known if word.startswith(last) and word not in before]

    return complete


def _together(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return the decorator that adds several options in this order."""

    def add(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return add


def named(option: str, metavar: str, legal: Legal, text: str, *, several: bool = False, **more: Any) -> Callable[[F], F]:
    """Return an option whose values a shell completes."""
    return click.option(option, metavar=metavar, shell_complete=complete_of(legal, several=several), help=text, **more)


arch_option = named(
    "--arch", "ARCH", words.ARCHITECTURES, f"One of {', '.join(words.ARCHITECTURES)}; this machine's device by default."
)
"""Architecture for which the command answers."""
_shapes_argument = click.argument("shapes", nargs=-1, metavar="[SHAPE]...")
shapes_options = _together(
    _shapes_argument,
    click.option("--shapes", "shapes_file", metavar="FILE", type=click.Path(), help="A JSON file with a list of shapes."),
)
device_option = named("--device", "DEVICE", words.DEVICES, "cpu, cuda or cuda:N; by default cuda if there is a GPU.")
devices_option = named(
    "--devices", "DEVICES", words.SEVERAL_DEVICES,
    "Devices to tune on at once: all GPUs of this host, their numbers such as 0,1, or cpu.",
)  # fmt: skip
ray_option = named(
    "--ray", "ADDRESS", ("auto",), "Tune on the GPUs of a Ray cluster: auto, or its address. Needs the extra gemmtune[fleet]."
)
timing_option = click.option(
    "--timing",
    type=click.Choice(get_args(Timing)),
    help="graph: kernel time alone; spaced: between other kernels; eager: with the host's cost.",
)
selection_options = _together(
    _shapes_argument,
    click.option("--match", metavar="REGEX", help="Only problems whose text matches REGEX (re.search), such as '^bmm .* float16'."),
    click.option("--here", is_flag=True, help="Only measurements that count on this machine."),
)
"""Options that select problems of the store."""
problem_options = _together(*click_options())
"""Options that apply to every shape of the command line."""
search_options = _together(
    named(
        "--backends", "NAMES", BACKENDS, f"Comma-separated names of {', '.join(BACKENDS)}; by default all that serve the device.",
        several=True, **_SEARCH,
    ),
    click.option("--search", type=click.Choice(get_args(Search)), help="How many configs each template offers.", **_SEARCH),
    click.option(
        "--with", "extra_choices", multiple=True, metavar="MODULE:FUNCTION", **_SEARCH,
        help="Your own GEMM to include, such as mylib.ops:matmul or kernels.py:matmul; may be given several times.",
    ),
)  # fmt: skip
"""Options that select what is tried."""
filter_options = _together(
    click.option(
        "--allow", "choice_allowlist_regex", metavar="REGEX", **_SEARCH,
        help="Try only choices whose name matches REGEX (re.search).",
    ),
    click.option(
        "--deny", "choice_denylist_regex", metavar="REGEX", **_SEARCH,
        help="Try no choice whose name matches REGEX; wins over --allow.",
    ),
)  # fmt: skip
"""Options that restrict which choices may be tried."""
