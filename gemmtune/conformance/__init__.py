"""Conformance: does a GEMM give right results, within its own declarations, whatever the sizes, strides and dtypes?

    gemmtune conformance mypkg.ops:matmul

``gemmtune.declaration`` says what a GEMM can declare, ``properties`` what is asserted of it, ``case`` what a case is. The suite
runs in pytest: ``suite/`` has the tests and ``plugin`` the options; nothing here needs pytest to be imported.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..declaration.traits import Traits, gemm

__all__ = ["Traits", "gemm"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import torch with the first of these names that is used: the command's help, which reads ``option_table``, needs none."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("..declaration.traits", __name__), name)
