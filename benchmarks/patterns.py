"""Block-sparse weights whose blocks do not lie at random."""

from __future__ import annotations

import dataclasses

import torch

from gemmtune.device import DeviceInfo
from gemmtune.numerics.block_sparse import assembled
from gemmtune.numerics.operands import Operands, random_operands
from gemmtune.problem import Problem

__all__ = ["band", "banded_operands"]

SEED = 20


def band(rows: int, cols: int, share: float) -> torch.Tensor:
    """Which blocks exist of a band along the diagonal, of equal length in each block row: that share of all, at least one."""
    width = min(max(round(share * cols), 1), cols)
    first = (torch.arange(rows) * cols // max(rows, 1) - width // 2).clamp(0, cols - width).unsqueeze(1)
    places = torch.arange(cols)
    return (places >= first) & (places < first + width)


def banded_operands(problem: Problem, device: DeviceInfo) -> Operands:
    """Random operands of the problem with a weight whose blocks are a band."""
    sparsity = problem.sparsity
    if sparsity is None:
        raise RuntimeError(f"banded: expected a block-sparse product, got {problem.op}")
    given = random_operands(problem, device.torch_device, seed=SEED)
    assert given.weight is not None
    mask = band(problem.n // sparsity.block_n, problem.k // sparsity.block_k, sparsity.density).to(device.torch_device)
    crow = torch.nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0))
    index = torch.int64 if sparsity.wide_index else torch.int32
    col = mask.nonzero(as_tuple=True)[1]
    have = given.weight.values()
    values = have[torch.arange(len(col), device=have.device) % max(len(have), 1)].contiguous()
    weight = assembled(crow.to(index), col.to(index), values, (problem.n, problem.k))
    return dataclasses.replace(given, weight=weight)
