"""Composable Kernel's GEMMs for AMD GPUs: our own table of instances, compiled here for each architecture.

No AMD GPU has run these kernels yet. They are compiled and inspected, and tests launch them against a stand-in for HIP.
"""

from .backend import CkBackend

BACKEND = CkBackend()
