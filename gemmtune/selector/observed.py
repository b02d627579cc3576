"""Observation of a choice that declares nothing: its calls must not contradict what is assumed of it."""

import torch

from ..choice import Choice, Kernel
from ..numerics.buffers import POISONS, allocate, poison
from ..numerics.grouped import random_operands
from ..numerics.operands import Operands
from ..numerics.some_rows import same_rows
from ..timing.contenders import capturing

CALLS = 4
"""Calls with equal inputs, whose bits are compared."""


def contradiction(choice: Choice, kernel: Kernel, device: torch.device) -> str:
    """Return what calls contradict, or "". Equal inputs give equal bits, and on a GPU the work is on the current stream.

    Exceptions of the kernel are not caught.
    """
    operands = random_operands(choice.problem, device)
    if choice.claims.deterministic:
        first = _result(choice, kernel, operands)
        if not all(same_rows(first, _result(choice, kernel, operands), 0) for _ in range(CALLS - 1)):
            return "equal inputs gave other bits, which deterministic forbids (GEMMTUNE_DETERMINISTIC=0 allows it where torch does)"
    return _captured(choice, kernel, operands) if device.type == "cuda" else ""


def _result(choice: Choice, kernel: Kernel, operands: Operands) -> torch.Tensor:
    out = allocate(choice.problem.out, operands.a.device)
    kernel.run(out, operands.tensors, operands.scalars)
    return out


def _captured(choice: Choice, kernel: Kernel, operands: Operands) -> str:
    """Compare a captured call, replayed with other numbers in its operands, with a call on them."""
    out, graph, a = allocate(choice.problem.out, operands.a.device), torch.cuda.CUDAGraph(), operands.a
    with capturing(graph):
        kernel.run(out, operands.tensors, operands.scalars)
    if a.is_contiguous() or a.mT.is_contiguous():  # others may overlap in memory
        a.copy_(a.flip(-2))
    expected = _result(choice, kernel, operands)
    poison(out, POISONS[out.dtype][0])
    untouched = out.clone()
    graph.replay()
    other = choice.claims.deterministic and not same_rows(expected, out, 0)
    if other or same_rows(untouched, out, 0):
        return "a CUDA graph of its call does not compute from its operands: its work is not all on the current stream"
    return ""
