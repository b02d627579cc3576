"""Shared part of the mixed_mm kernels, which read 4-bit or 8-bit weights in their original layout."""
