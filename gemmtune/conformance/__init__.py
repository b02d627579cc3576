"""Conformance: does a GEMM give right results, within its own declarations, whatever the sizes, strides and dtypes?

    gemmtune conformance mypkg.ops:matmul

``traits`` says what a GEMM can declare, ``properties`` what is asserted of it, ``case`` what a case is. The suite runs in pytest:
``suite/`` has the tests and ``plugin`` the options; nothing here needs pytest to be imported.
"""

from .gemms.traits import Traits, gemm

__all__ = ["Traits", "gemm"]
