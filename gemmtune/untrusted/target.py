"""Place of a GEMM that nobody vouches for."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Place of a GEMM. ``kind`` is module, file, library or torch, ``name`` the function or "" for the only one."""

    kind: str
    path: str
    name: str = ""
    roots: tuple[str, ...] = ()
    """Folders and files of the GEMM's own code."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Declarations of a library, which cannot carry them."""
    words: str = ""
    """Target as the user wrote it."""

    def __str__(self) -> str:
        return self.words or f"{self.path}:{self.name}"


IMPORT_ONLY = "*"
"""Name in a target of a module that is only imported."""
NOTHING = "nothing"
"""Function of ``TORCH`` that returns its argument."""
TORCH = Target(kind="torch", path="torch")


def roots_of(module: str) -> tuple[str, ...]:
    """Return the file or the folder of a module, in the working folder too, without importing it. () if there is none."""
    name = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    spec = spec or PathFinder.find_spec(name, [os.getcwd()])
    folders = tuple(spec.submodule_search_locations or ()) if spec else ()
    return folders or ((spec.origin,) if spec and spec.origin else ())
