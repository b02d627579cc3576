"""Composable Kernel's GEMMs for AMD GPUs: a table of instances of our own, compiled here for each architecture.

No AMD GPU has run them yet: they are compiled and inspected, and their launch is tested against a stand-in for HIP.
"""

from __future__ import annotations

from .backend import CkBackend

BACKEND = CkBackend()
