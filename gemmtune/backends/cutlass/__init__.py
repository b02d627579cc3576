"""CUTLASS backend: kernels of NVIDIA CUTLASS, one source for each operation of its library, compiled with nvcc."""

from .backend import CutlassBackend

BACKEND = CutlassBackend()
