"""Errors that a GEMM raises: what is a refusal, what is the end of its device, and what is not possible here."""

from __future__ import annotations

import torch

from ...errors import ErrorFromChoice

__all__ = ["Impossible", "Refused", "is_fatal"]

_STICKY = (
    "illegal memory access",
    "unspecified launch failure",
    "device-side assert",
    "misaligned address",
    "illegal instruction",
)


class Refused(Exception):
    """The GEMM raised an error, of whatever type its library has for that, instead of computing."""


class Impossible(Exception):
    """What the case needs is not there, such as the memory, or the kernel that is to be tested. That says nothing of the GEMM."""


def is_fatal(error: BaseException) -> bool:
    """Whether a CUDA error has made the device unusable for this process, so that nothing after it can be believed."""
    if isinstance(error, ErrorFromChoice):
        return False
    text = str(error)
    accelerator = getattr(torch, "AcceleratorError", ())
    return any(words in text for words in _STICKY) or (
        bool(accelerator) and isinstance(error, accelerator) and "out of memory" not in text
    )
