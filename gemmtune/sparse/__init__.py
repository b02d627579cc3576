"""Block-sparse weights: tensors to try things with, and what is known of parameters of their kernels."""

from .tensors import create_blocked_tensor

__all__ = ["create_blocked_tensor"]
