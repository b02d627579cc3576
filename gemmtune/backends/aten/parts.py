"""float32 by torch's bfloat16 products: operands split into three parts each, and three products along K with float32 sums.

a's parts lie side by side as [low middle high] and b's as [high middle low], so that one product of 3K terms is low·high +
middle·middle + high·low, one of its last (a) and first (b) 2K terms middle·high + high·middle, and one of K terms high·high. The
small ones come first. A matrix unit may truncate its sums, so the last one is cut along K, and its pieces are added in float32.

What is not finite is in a low part, which meets a high one alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...choice import Kernel, Scalars, Tensors
from ...problem import Problem
from ..by_parts import parts_of
from .dense import finished

Tensor = torch.Tensor

PROMOTED_EVERY = 1024
"""Terms of high·high that one product adds up."""
MULTIPLE = 8
"""K is padded to such a multiple with zeros: parts then begin at multiples of 16 bytes."""
FORMAT = "float32 by parts"
"""The name of the layout of a prepacked b."""


def kernel_of(problem: Problem) -> Kernel:
    """The calls for a dense problem of float32; with ``prepacked`` b comes as ``packed`` has it."""
    prepacked = problem.prepacked
    direct = problem.out.row_major

    def product(out: Tensor, tensors: Tensors, scalars: Scalars) -> Tensor:
        a, b, *added = tensors
        _multiply(out, side_by_side(a, (2, 1, 0)), b if prepacked else packed(b))
        if added:
            alpha, beta = scalars
            if alpha != 1:
                out *= alpha
            if beta != 0:
                out.add_(added[0], alpha=beta)
        return out

    def run_new(tensors: Tensors, scalars: Scalars) -> Tensor:
        return product(tensors[0].new_empty(problem.out.size), tensors, scalars)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        if direct:
            product(out, tensors, scalars)
        else:
            out.copy_(run_new(tensors, scalars))

    return finished(Kernel(run=run, run_new=run_new), problem)


def packed(b: Tensor) -> Tensor:
    """b [.., K, N] as [.., 3K', N] of bfloat16: high, middle, low, with neighbours in memory along K."""
    return side_by_side(b.mT, (0, 1, 2)).mT


def side_by_side(x: Tensor, order: tuple[int, int, int]) -> Tensor:
    """The parts of x [.., rows, K] in this order (0: high) along K, each padded with zeros to K'."""
    k = x.shape[-1]
    each = math.ceil(k / MULTIPLE) * MULTIPLE
    made = (x.new_empty if each == k else x.new_zeros)((*x.shape[:-1], 3 * each), dtype=torch.bfloat16)
    parts = parts_of(x)
    for place, part in enumerate(order):
        made[..., place * each : place * each + k].copy_(parts[part])
    return made


def _multiply(out: Tensor, a: Tensor, b: Tensor) -> None:
    """The sum of the six products of parts, into ``out``."""
    k = a.shape[-1] // 3
    first, add = _calls(out)
    first(a, b)
    add(a[..., k:], b[..., : 2 * k, :])
    for k0 in range(0, k, PROMOTED_EVERY):
        k1 = min(k0 + PROMOTED_EVERY, k)
        add(a[..., 2 * k + k0 : 2 * k + k1], b[..., k0:k1, :])


def _calls(out: Tensor) -> tuple[Callable[[Tensor, Tensor], object], Callable[[Tensor, Tensor], object]]:
    """Functions that write a product of bfloat16 into ``out``, and that add one to it."""
    batched = out.dim() == 3
    product: Callable[..., Tensor] = torch.bmm if batched else torch.mm
    if out.device.type == "cpu":  # where torch has no products of bfloat16 into float32
        return (lambda a, b: product(a.float(), b.float(), out=out)), (lambda a, b: out.add_(product(a.float(), b.float())))
    added: Callable[..., Tensor] = torch.baddbmm if batched else torch.addmm
    return (
        lambda a, b: product(a, b, out_dtype=torch.float32, out=out),
        lambda a, b: added(out, a, b, out_dtype=torch.float32, out=out),
    )
