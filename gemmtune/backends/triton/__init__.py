"""Triton templates: mm, addmm, bmm and baddbmm from one source, with split-K and fused epilogues."""

from .backend import TritonBackend

__all__ = ["BACKEND", "TritonBackend"]

BACKEND = TritonBackend()
"""The backend object of the table in backends.py."""
