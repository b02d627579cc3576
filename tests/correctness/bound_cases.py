"""Right kernels of several orders of summation, and how a result compares with the bound."""

from __future__ import annotations

import math

import torch
from broken_kernels import Product, backwards, one_by_one, pairwise, shuffled, split_k

from gemmtune.choice import Claims
from gemmtune.numerics.expectation import Referenced
from gemmtune.numerics.judging import Judge
from gemmtune.numerics.operands import Operands
from gemmtune.numerics.reference import Region, extended_reference, reference
from gemmtune.problem import Problem


def orders(dtype: torch.dtype) -> dict[str, Product]:
    """Right kernels by name; ``dtype`` is the accumulator's. Split-K has four parts."""
    return {
        "torch": torch.matmul, "one by one": one_by_one, "backwards": backwards, "pairwise": pairwise, "split": split_k(dtype, 4),
        "shuffled": shuffled,
    }  # fmt: skip


def scaled(acc: torch.Tensor, operands: Operands, dtype: torch.dtype) -> torch.Tensor:
    """A right kernel's last step: multiplications by the scales in the accumulator's type, and one rounding."""
    if operands.scale_a is not None and operands.scale_b is not None:
        acc = acc * operands.scale_a * operands.scale_b
    return acc.to(dtype)


def ratio(problem: Problem, claims: Claims, operands: Operands, out: torch.Tensor, *, extended: bool = False) -> float:
    """Largest error over what is allowed; infinite if some element is rejected."""
    known = extended_reference(operands, 1, problem.m, problem.n, problem.k) if extended else reference(operands, Region())
    finding = Judge(problem, claims).find(out, Referenced(name="", operands=operands, references=(known,)))
    return math.inf if finding.state[0] else float(finding.ratio)
