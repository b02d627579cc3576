"""Triton templates: one source for mm, addmm, bmm and baddbmm, with split-K and fused epilogues."""

from .backend import TritonBackend

__all__ = ["BACKEND", "TritonBackend"]

BACKEND = TritonBackend()
"""Backend object that the table in backends.py lists."""
