"""Triton kernels of grouped products."""
