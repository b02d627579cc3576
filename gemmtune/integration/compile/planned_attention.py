"""The attention of one query that replaces torch's in a compiled graph: a function that writes into ``out``, and an operator.

This module does not import Inductor, because a graph may run without it.
"""

import torch

from ...errors import InvalidProblemError
from ...passes import load
from .planned import LIBRARY

Tensor = torch.Tensor

LIBRARY.define("attend(Tensor[] tensors, *, float scale, int splits, int block, int warps) -> Tensor")  # type: ignore[no-untyped-call]
OPERATOR = torch.ops.gemmtune.attend.default
"""Operator of attention. ``tensors`` are the query, keys, values and, if there is one, the bias."""


def run_attention(*tensors: Tensor, out: Tensor, scale: float, splits: int, block: int, warps: int) -> None:
    """Write the attention into ``out``, by ``passes.attention`` on a GPU.

    Raises InvalidProblemError if keys and values differ in shape, which a graph with dynamic shapes cannot rule out.
    """
    if tensors[1].shape != tensors[2].shape:
        raise InvalidProblemError(
            f"attention: got keys of {list(tensors[1].shape)}, values of {list(tensors[2].shape)}; expected equal shapes"
        )
    if out.is_cuda:
        q, k, v, bias = (*tensors, None)[:4]
        load("attention").attend(q, k, v, bias, out, scale=scale, splits=splits, block=block, warps=warps)
    else:
        out.copy_(composition(*tensors, scale=scale))


def composition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, scale: float) -> Tensor:
    """Return softmax(scale · q·kᵀ + bias)·v by torch in float32, without repeating the heads of the keys."""
    batch, heads, one, width = q.shape
    scores = q.float().reshape(batch, k.shape[1], -1, width) @ k.float().mT * scale
    scores = scores.reshape(batch, heads, one, -1)
    scores = scores if bias is None else scores + bias.float()
    weights = torch.softmax(scores, -1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
    return (weights.reshape(batch, k.shape[1], -1, k.shape[2]) @ v.float()).reshape(q.shape)


def _new(tensors: list[Tensor], *, scale: float, splits: int, block: int, warps: int) -> Tensor:
    out = _empty(tensors)
    run_attention(*tensors, out=out, scale=scale, splits=splits, block=block, warps=warps)
    return out


def _empty(tensors: list[Tensor], **_: object) -> Tensor:
    return tensors[0].new_empty(tensors[0].shape)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("attend", _new, _device)  # type: ignore[no-untyped-call]
torch.library.register_fake("gemmtune::attend", _empty, lib=LIBRARY)
