"""C++ templates: every operation on a CPU, packed, with fused epilogues."""

from .backend import CppBackend

__all__ = ["BACKEND", "CppBackend"]

BACKEND = CppBackend()
"""The backend object of the table in backends.py."""
