"""Sets of operands that calls take in turn, so that a measurement finds them in memory and not in a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..choice import Choice
from ..device import MIB, DeviceInfo
from ..numerics.block_sparse import copied
from ..numerics.buffers import allocate, flat
from ..numerics.operands import Operands, random_operands
from ..problem import Layout, Problem

CPU_CACHES = 4.0
"""The sets together are this many times the last-level cache: with less, part of an operand survives a round of contenders, each
of which is somewhere else in the rotation."""
GPU_CACHES = 8.0
"""More on a GPU: the time of one kernel differs by up to 7% from process to process, and many places in memory leave less of that
to chance."""
MOST_SETS = 256
"""Filling more costs longer than it tells: operands that small are fast to fetch, and launches dominate."""
CPU_BUDGET_BYTES = 1024 * MIB
GPU_BUDGET_SHARE = 0.25
"""The share of the free device memory that operands may have: the verifier and the program that is being tuned need the rest."""
SEED = 20


def set_count(set_bytes: int, least_bytes: int, budget_bytes: int) -> int:
    """How many operand sets of ``set_bytes`` to take turns with: ``least_bytes`` in all, as the memory allows; at least 1."""
    wanted = least_bytes // max(set_bytes, 1) + 1
    return max(1, min(wanted, MOST_SETS, budget_bytes // max(set_bytes, 1)))


class Rotation:
    """The operand sets of one problem on one device: random numbers unless others are given, equal in all sets, in memory that no
    two of them share."""

    def __init__(self, problem: Problem, device: DeviceInfo, given: Operands | None = None) -> None:
        target = device.torch_device
        caches = CPU_CACHES if device.type == "cpu" else GPU_CACHES
        budget_bytes = CPU_BUDGET_BYTES if device.type == "cpu" else GPU_BUDGET_SHARE * torch.cuda.mem_get_info(target)[0]
        count = set_count(problem.bytes, int(caches * device.last_level_cache_bytes), int(budget_bytes))
        first = given or random_operands(problem, target, seed=SEED)
        self.sets: tuple[Operands, ...] = (first, *(_copy(first) for _ in range(count - 1)))
        self._packed: dict[str, tuple[Operands, ...]] = {}

    def for_choice(self, choice: Choice) -> Sequence[Operands]:
        """The sets as that choice wants them: b packed if it has a packed format (once for all choices of one format)."""
        name = choice.packed_format
        if name is None:
            return self.sets
        if name not in self._packed:
            packed = choice.pack(self.sets[0].named["b"])  # which costs more than copying what it gives
            self._packed[name] = tuple(_with_b(s, packed if i == 0 else _copy_tensor(packed)) for i, s in enumerate(self.sets))
        return self._packed[name]


def _copy(operands: Operands) -> Operands:
    given: dict[str, Any] = {role: _copy_tensor(tensor) for role, tensor in operands.named.items()}
    extra = tuple(map(_copy_tensor, operands.extra))
    b = given.pop("b")
    return _with_b(dataclasses.replace(operands, out=_copy_tensor(operands.out), extra=extra, **given), b)


def _with_b(operands: Operands, b: torch.Tensor) -> Operands:
    """The operands with this in b's place, as kernels get it."""
    return dataclasses.replace(operands, b=b) if operands.weight is None else dataclasses.replace(operands, weight=b)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the same layout; copied as memory, because a layout with stride 0 cannot be written element by element."""
    if tensor.layout == torch.sparse_bsr:
        return copied(tensor)
    copy = allocate(Layout.of(tensor), tensor.device)
    flat(copy).copy_(flat(tensor))
    return copy
