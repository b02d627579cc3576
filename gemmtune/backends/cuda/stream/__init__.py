"""Persistent kernels for dense products of 16-bit operands: each block multiplies one tile after another, and shares the last tiles."""
