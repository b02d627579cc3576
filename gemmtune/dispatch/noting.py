"""Who is told of whole calls, with their epilogues, where they write and what is prepacked: the recording of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..problem import Problem


def noted(problem: Callable[[], Problem | None]) -> contextlib.AbstractContextManager[None]:
    """A block that does a call, which the dispatch mode in force is told of as a whole if it has a method ``note_call``.

    Below, such a mode sees the parts of the call alone: an operator, and what torch makes of its epilogue.
    """
    mode = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
    note_call = getattr(mode, "note_call", None)
    block: contextlib.AbstractContextManager[None] = contextlib.nullcontext() if note_call is None else note_call(problem)
    return block
