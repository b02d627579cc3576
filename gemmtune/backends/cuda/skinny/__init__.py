"""Kernels for few rows times 4-bit or 8-bit weights: weights are widened in registers and multiplied by single warps."""
