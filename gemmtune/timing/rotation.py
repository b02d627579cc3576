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
from ..numerics.some_rows import some_rows
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
    """The operand sets of one problem on one device, and of those that differ from it in having fewer rows: random numbers unless
    others are given, equal in all sets, in memory that no two of them share."""

    def __init__(self, problem: Problem, device: DeviceInfo, given: Operands | None = None) -> None:
        target, on_cpu = device.torch_device, device.type == "cpu"
        budget_bytes = CPU_BUDGET_BYTES if on_cpu else GPU_BUDGET_SHARE * torch.cuda.mem_get_info(target)[0]
        self._least_bytes = int((CPU_CACHES if on_cpu else GPU_CACHES) * device.last_level_cache_bytes)
        self._most = int(budget_bytes) // max(problem.bytes, 1)
        self._made = [given or random_operands(problem, target, seed=SEED)]
        self._packed: dict[str, list[torch.Tensor]] = {}
        self.sets: Sequence[Operands] = self._as_many_as_take(problem)

    def of_rows(self, part: Problem) -> Sequence[Operands]:
        """The sets of a problem with fewer rows, the first ones of these; what follows M is memory of its own."""
        return [some_rows(s, part, 0) for s in self._as_many_as_take(part)]

    def _as_many_as_take(self, problem: Problem) -> Sequence[Operands]:
        count = set_count(problem.bytes, self._least_bytes, self._most * problem.bytes)
        self._made += [_copy(self._made[0]) for _ in range(count - len(self._made))]
        return self._made[:count]

    def packed(self, sets: Sequence[Operands], choice: Choice) -> Sequence[Operands]:
        """The sets as that choice wants them: b packed if it has a packed format (once for all choices of one format)."""
        name = choice.packed_format
        if name is None:
            return sets
        known = self._packed.setdefault(name, [])
        if not known:
            known.append(choice.pack(self._made[0].named["b"]))  # which costs more than copying what it gives
        known += [_copy_tensor(known[0]) for _ in range(len(sets) - len(known))]
        return [_with_b(s, b) for s, b in zip(sets, known, strict=False)]


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
