"""Kernels of mixed_mm that read weights as 32-bit words and convert them to numbers with a few bit operations."""
