"""Kernels of mixed_mm whose weights are read as words of 32 bits and become numbers by a few bit operations."""
