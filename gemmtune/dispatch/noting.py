"""Reports of whole calls, with epilogue, ``out`` and prepacking, to a recording that is in force."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..problem import Problem


def noted(problem: Callable[[], Problem | None]) -> contextlib.AbstractContextManager[None]:
    """Return a context for one call, reported as a whole, not only in parts, to a dispatch mode with a method ``note_call``."""
    mode = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
    note_call = getattr(mode, "note_call", None)
    block: contextlib.AbstractContextManager[None] = contextlib.nullcontext() if note_call is None else note_call(problem)
    return block
