"""Functions for code that Inductor generated, which imports them by name: a graph out of any cache brings what it needs.

Such code may be older than this package, and may run where our pass never ran and nothing of gemmtune was imported. The import
defines every operator of ``torch.ops.gemmtune``, which the code may name too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import UnavailableError
from ...operators import library as _operators  # noqa: F401 - defines operators of torch
from ...sparse import operators as _block_operators  # noqa: F401 - defines operators of torch
from ...version import __version__
from .planned import ready_launch, run_planned
from .planned_join import ready_pieces, run_join

INTERFACE = 1
"""Number of what generated code relies on: the functions' names and arguments, and the text of a Problem. A change raises it."""
NAME = "gemmtune_extern_kernels"
"""Name of the functions in generated code. Inductor's scheduler takes calls of ``extern_kernels`` for GEMMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """The functions that generated code calls: two products, and what makes each ready when the code is loaded."""

    planned: Callable[..., None]
    planned_join: Callable[..., None]
    ready: Callable[[str, int], None]
    ready_join: Callable[[str, Sequence[int], int], None]


def functions(interface: int, version: str) -> Functions:
    """Return the functions for code that was generated for an interface, by a version of gemmtune.

    Raises:
        UnavailableError: this version has another interface.
    """
    if interface != INTERFACE:
        raise UnavailableError(
            f"a compiled graph: got one that gemmtune {version} made for interface {interface} of its functions, but gemmtune "
            f"{__version__} has interface {INTERFACE}. Compile the model again, or install gemmtune {version}."
        )
    return _FUNCTIONS


def import_lines() -> tuple[str, str]:
    """Return the statements by which generated code gets the functions, or says what it misses."""
    missing = (
        f"a compiled graph calls functions of gemmtune {__version__}, which cannot be imported here. "
        "Install that version, or compile the model again without gemmtune."
    )
    imported = (
        f"try:\n    from {__name__} import functions as {NAME}_of\n"
        f"except ImportError as error:\n    raise ImportError({missing!r}) from error"
    )
    return imported, f"{NAME} = {NAME}_of({INTERFACE}, {__version__!r})"


def _ready(problem: str, index: int) -> None:
    """Make a product ready before it is called, and so before any capture, as the pass does while a graph compiles."""
    if index < torch.cuda.device_count():
        ready_launch(problem, index)


def _ready_join(problem: str, widths: Sequence[int], index: int) -> None:
    """Make one product of several ready, and each of them."""
    if index < torch.cuda.device_count():
        ready_pieces(problem, widths, index)
        ready_launch(problem, index)


_FUNCTIONS = Functions(planned=run_planned, planned_join=run_join, ready=_ready, ready_join=_ready_join)
