"""CUDA backend: our own CUDA C++ kernels, compiled with NVRTC or nvcc."""

from .backend import CudaBackend

__all__ = ["BACKEND", "CudaBackend"]

BACKEND = CudaBackend()
"""Backend object that the table in backends.py lists."""
