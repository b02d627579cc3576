"""The table of backends. To add one: write its module with a ``BACKEND`` object (see ``choice.Backend``) and add a line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .choice import Backend

__all__ = ["BACKENDS", "TEMPLATES", "load"]

BACKENDS: dict[str, str] = {
    "aten": "gemmtune.extern.aten",
    "cublaslt": "gemmtune.extern.cublaslt",
    "triton": "gemmtune.templates.triton",
    "cutlass": "gemmtune.templates.cutlass",
    "cuda": "gemmtune.templates.cuda",
    "cpp": "gemmtune.templates.cpp",
}
"""Backend name to the module that holds its ``BACKEND``. The order is the one in which ties are broken: library kernels first."""

TEMPLATES = frozenset(name for name, module in BACKENDS.items() if ".templates." in module)
"""The backends whose kernels are made from our own templates."""


def load(name: str) -> Backend:
    """The backend of that name, imported when first needed: heavy toolchains stay out of the package's import."""
    backend: Backend = importlib.import_module(BACKENDS[name]).BACKEND
    return backend
