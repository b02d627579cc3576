"""Table of backends. To add one, write its module with a ``BACKEND`` object (see ``choice.Backend``) and add a line here."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SettingsError

if TYPE_CHECKING:
    from ..choice import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """One backend of the table: the ``module`` of its ``BACKEND``, and a setting that includes it (``brought_by``).

    ``compiles``: a compiler makes its kernels from our templates. Other backends call libraries.
    """

    module: str
    compiles: bool
    brought_by: str | None = None


BACKENDS: dict[str, BackendRow] = {
    "aten": BackendRow(module="gemmtune.backends.aten", compiles=False),
    "cublaslt": BackendRow(module="gemmtune.backends.cublaslt", compiles=False),
    "triton": BackendRow(module="gemmtune.backends.triton", compiles=True),
    "cutlass": BackendRow(module="gemmtune.backends.cutlass", compiles=True),
    "ck": BackendRow(module="gemmtune.backends.ck", compiles=True),
    "cuda": BackendRow(module="gemmtune.backends.cuda", compiles=True),
    "cpp": BackendRow(module="gemmtune.backends.cpp", compiles=True),
    "own": BackendRow(module="gemmtune.backends.own", compiles=False, brought_by="extra_choices"),
}
"""Rows by backend name, in the order that breaks ties: library kernels first."""

TEMPLATES = tuple(name for name, row in BACKENDS.items() if row.compiles)
"""Backends whose kernels are made from our templates."""


def check_names(names: Iterable[str]) -> None:
    """Raise SettingsError for a name that is not in the table."""
    for name in names:
        if name not in BACKENDS:
            raise SettingsError(f"backends (GEMMTUNE_BACKENDS): got {name!r}, expected names out of {', '.join(BACKENDS)}")


def load(name: str) -> Backend:
    """Return the backend of that name, imported at first use to keep heavy toolchains out of the package's import."""
    backend: Backend = importlib.import_module(BACKENDS[name].module).BACKEND
    return backend
