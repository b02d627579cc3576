"""Casts of operands as torch's autocast makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .arguments import Call


@contextmanager
def autocast_done(call: Call) -> Iterator[bool]:
    """Cast the operands of a call where autocast is on, and turn it off for a ``with`` block. Yield True if it was on.

    torch casts nothing where out= is given. Without turning it off, a product of float32 within a kernel would be cast once more.
    """
    kind = call.a.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        yield False
        return
    if call.out is None:
        cast_for_autocast(call)
    with torch.autocast(kind, enabled=False):
        yield True


def cast_for_autocast(call: Call) -> None:
    """Cast the operands to the autocast dtype, as torch does. Block-sparse products keep theirs: torch casts no sparse tensor."""
    if call.operation.sparse:
        return
    kind = call.a.device.type
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.float16, torch.bfloat16)
    for operand in call.operation.operands:
        x = call.operands.get(operand.role)
        if x is None or x.dtype not in eligible or x.dtype == dtype:
            continue
        if not operand.scales:
            call.operands[operand.role] = x.to(dtype)
            call.packed = None if operand.role == "b" else call.packed
        elif operand.like_a:
            call.operands[operand.role] = x.float()
