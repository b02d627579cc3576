"""Persistent kernels for dense products of 16-bit operands: blocks walk over tiles, and share the last ones."""
