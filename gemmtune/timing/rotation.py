"""Sets of operands that calls use in turn, so that a measurement reads them from memory instead of a cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..choice import Choice
from ..device import MIB, DeviceInfo
from ..numerics.block_sparse import copied
from ..numerics.operands import Operands, random_operands
from ..numerics.slots import Slots, copy_elements, tight, tight_problem
from ..numerics.some_rows import some_rows
from ..problem import Layout, Problem

CPU_CACHES = 4.0
"""Size of all sets on a CPU in last-level caches. With less, part of an operand survives a round of contenders."""
GPU_CACHES = 8.0
"""Same multiple for a GPU. A kernel's time differs by up to 7% from place to place, and more sets average this out."""
MOST_SETS = 256
"""Limit on the number of sets. Filling more takes too long: such small operands are fast to fetch, and launches dominate."""
CPU_BUDGET_BYTES = 1024 * MIB
GPU_BUDGET_SHARE = 0.25
"""Share of the free device memory for operands. The verifier and the program that is tuned need the rest."""
SEED = 20


def set_count(set_bytes: int, least_bytes: int, budget_bytes: int) -> int:
    """Return how many operand sets of ``set_bytes`` to use in turn: at least 1, and ``least_bytes`` in total if memory allows."""
    wanted = least_bytes // max(set_bytes, 1) + 1
    return max(1, min(wanted, MOST_SETS, budget_bytes // max(set_bytes, 1)))


def cache_bytes(device: DeviceInfo) -> int:
    """Return the size of the last cache before the memory, which benchmarks have to overflow."""
    return device.l3_bytes or device.l2_bytes


def least_bytes(device: DeviceInfo) -> int:
    """Return the size of all sets together that no cache of the device keeps."""
    return int((CPU_CACHES if device.type == "cpu" else GPU_CACHES) * cache_bytes(device))


def leaves_caches(problem: Problem, device: DeviceInfo) -> bool:
    """Return True if the sets of a problem are so large that calls read them from memory."""
    return MOST_SETS * problem.bytes >= least_bytes(device)


class Rotation:
    """Operand sets of one problem, and of it with fewer rows, in separate memory, with numbers equal, random unless ``given``."""

    def __init__(self, problem: Problem, device: DeviceInfo, given: Operands | None = None) -> None:
        target, on_cpu = device.torch_device, device.type == "cpu"
        budget_bytes = CPU_BUDGET_BYTES if on_cpu else GPU_BUDGET_SHARE * torch.cuda.mem_get_info(target)[0]
        self._least_bytes = least_bytes(device)
        self._most = int(budget_bytes) // max(problem.bytes, 1)
        self._device = target
        self._layouts = dict(problem.operands) | {"out": problem.out}
        self._slots: dict[str, Slots] = {}
        self._made = [given or self._spread(random_operands(tight_problem(problem), target, seed=SEED))]
        self._packed: dict[str, list[torch.Tensor]] = {}
        self.sets: Sequence[Operands] = self._as_many_as_take(problem)

    def of_rows(self, part: Problem) -> Sequence[Operands]:
        """Return the sets of a problem with fewer rows, cut from these sets. Operands that depend on M get separate memory."""
        slots: dict[str, Slots] = {}

        def make(role: str, layout: Layout) -> torch.Tensor:
            return slots.setdefault(role, Slots(layout, self._device)).take()

        return [some_rows(s, part, 0, make) for s in self._as_many_as_take(part)]

    def _as_many_as_take(self, problem: Problem) -> Sequence[Operands]:
        count = set_count(problem.bytes, self._least_bytes, self._most * problem.bytes)
        self._made += [self._copy(self._made[0]) for _ in range(count - len(self._made))]
        return self._made[:count]

    def packed(self, sets: Sequence[Operands], choice: Choice) -> Sequence[Operands]:
        """Return the sets as the choice needs them: b packed, once per format, if the choice has a packed format."""
        name = choice.packed_format
        if name is None:
            return sets
        known = self._packed.setdefault(name, [])
        if not known:
            known.append(choice.pack(self._made[0].named["b"]))  # packing costs more than copying the result
        known += [self._copy_tensor(f"packed {name}", known[0]) for _ in range(len(sets) - len(known))]
        return [_with_b(s, b) for s, b in zip(sets, known, strict=False)]

    def _spread(self, operands: Operands) -> Operands:
        """Return operands of ``tight_problem`` in the problem's layouts."""
        gaps = [role for role, layout in self._layouts.items() if tight(layout) != layout]
        copies: dict[str, Any] = {role: self._copy_tensor(role, getattr(operands, role)) for role in gaps}
        return dataclasses.replace(operands, **copies)

    def _copy(self, operands: Operands) -> Operands:
        given: dict[str, Any] = {role: self._copy_tensor(role, tensor) for role, tensor in operands.named.items()}
        extra = tuple(self._copy_tensor(f"extra {i}", x) for i, x in enumerate(operands.extra))
        b = given.pop("b")
        return _with_b(dataclasses.replace(operands, out=self._copy_tensor("out", operands.out), extra=extra, **given), b)

    def _copy_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor with its layout. Copies under one name share buffers."""
        if tensor.layout == torch.sparse_bsr:
            return copied(tensor)
        if name not in self._slots:
            self._slots[name] = Slots(self._layouts.get(name) or Layout.of(tensor), tensor.device)
        copy = self._slots[name].take()
        copy_elements(copy, tensor)
        return copy


def _with_b(operands: Operands, b: torch.Tensor) -> Operands:
    """Return the operands with the given b, in the place from which kernels read it."""
    return dataclasses.replace(operands, b=b) if operands.weight is None else dataclasses.replace(operands, weight=b)
