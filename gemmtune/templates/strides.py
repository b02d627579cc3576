"""Strides as the C entry points of compiled kernels take them."""

from __future__ import annotations

import ctypes

__all__ = ["Strides"]


class Strides(ctypes.Structure):
    """``struct Strides`` of the templates: in elements; ``batch`` from one product to the next."""

    _fields_ = [("row", ctypes.c_longlong), ("col", ctypes.c_longlong), ("batch", ctypes.c_longlong)]
