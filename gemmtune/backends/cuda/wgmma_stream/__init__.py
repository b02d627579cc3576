"""Persistent kernels for many rows times 4-bit or 8-bit weights: each block multiplies one tile after another, and shares tiles."""
