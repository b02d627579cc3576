"""C++ templates: packed kernels with fused epilogues for every operation on a CPU."""

from .backend import CppBackend

__all__ = ["BACKEND", "CppBackend"]

BACKEND = CppBackend()
"""Backend object that the table in backends.py lists."""
