"""C++ templates: packed kernels with fused epilogues for every operation on a CPU."""

from .backend import CppBackend

BACKEND = CppBackend()
