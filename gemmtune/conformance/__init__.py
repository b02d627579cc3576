"""Conformance suite: tests that a GEMM is right for every size, stride and dtype that it declares.

    gemmtune conformance mypkg.ops:matmul

``gemmtune.declaration`` defines what a GEMM can declare, ``properties`` what the suite asserts, and ``cases`` what one case is.
The suite runs in pytest: ``suite/`` has the tests and ``plugin`` the options. Every other module imports without pytest.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..declaration.traits import Traits, gemm

__all__ = ["Traits", "gemm"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import torch on the first use of one of these names. The command's help reads ``option_table`` without torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("..declaration.traits", __name__), name)
