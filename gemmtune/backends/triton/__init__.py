"""Triton templates: one source for mm, addmm, bmm and baddbmm, with split-K and fused epilogues."""

from .backend import TritonBackend

BACKEND = TritonBackend()
