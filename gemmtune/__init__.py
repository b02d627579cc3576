"""gemmtune finds the fastest correct GEMM for a shape on this machine, remembers it, and proves it."""

from .problem import Problem
from .version import __version__

__all__ = ["Problem", "__version__"]
