"""The cuda backend: kernels of our own in CUDA C++, compiled with NVRTC or nvcc."""

from .backend import CudaBackend

__all__ = ["BACKEND", "CudaBackend"]

BACKEND = CudaBackend()
"""The backend object of the table in backends.py."""
