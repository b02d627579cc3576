"""Kernels for products of few rows, whose time is that of reading b once: swapped operands, and products without tensor cores."""
