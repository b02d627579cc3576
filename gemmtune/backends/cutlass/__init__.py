"""CUTLASS backend: kernels of NVIDIA CUTLASS, one source for each operation of its library, compiled with nvcc."""

from .backend import CutlassBackend

__all__ = ["BACKEND", "CutlassBackend"]

BACKEND = CutlassBackend()
"""Backend object that the table in backends.py lists."""
