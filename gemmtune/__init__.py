"""gemmtune finds the fastest correct GEMM for a shape on this machine, remembers it, and proves it."""

from .problem import Problem

__all__ = ["Problem"]

__version__ = "0.1.0"
