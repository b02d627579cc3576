"""The one place that decides whether something made of a tensor's numbers is still good: every cache of such things asks it.

torch counts most changes of a tensor in its version, but not all. A ``Stamp`` therefore also notices:

- other memory (``x.data = y``, ``set_``, ``share_memory_``, ``resize_`` of a storage, swaps): the storage or its address differs;
- fused optimizers, which count no version: any step of any ``torch.optim.Optimizer`` renews what is made of floats;
- on a CPU, writes that nothing counts (through ``.data``, numpy, DLPack, other processes, inference tensors): a thousand elements,
  spread over rows and columns, are compared.

A write that nothing counts is missed on a GPU, and on a CPU if it changes none of these elements. ``prepack`` says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

Tensor = torch.Tensor

SAMPLE = 1024
"""Elements that are compared on a CPU: 2 to 9 µs."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's size: a NaN equals itself there."""
_NO_STEPS = -1
"""The number of steps for integers, which no optimizer changes."""
_steps: list[int] = []
"""The number of optimizer steps so far; empty until the first stamp of floats, so that other programs have no hook."""


def _count_step(*_: Any) -> None:
    _steps[0] += 1


def optimizer_steps() -> int:
    """Return the number of steps that optimizers of torch took since the first call."""
    if not _steps:
        _steps.append(0)
        register_optimizer_step_post_hook(_count_step)
    return _steps[0]


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """The state of some tensors at one moment, for a cache of what was made of their numbers."""

    parts: "tuple[_Part, ...]"
    steps: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Stamp":
        """Return the stamp of what these tensors hold now. Take it before their numbers are read."""
        floats = any(x.is_floating_point() for x in tensors)
        return cls(tuple(_Part.of(x) for x in tensors), optimizer_steps() if floats else _NO_STEPS)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the tensors have the stamp's numbers. Inference tensors on a GPU cannot tell, so theirs never holds."""
        if self.steps not in (_NO_STEPS, *_steps) or len(self.parts) != len(tensors):
            return False
        return all(part.holds(x) for part, x in zip(self.parts, tensors, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The state of one tensor: its version, its memory, and on a CPU some elements (an alias of them) with the values they had."""

    version: int
    address: int
    size: torch.Size
    storage: StorageWeakRef
    elements: Tensor | None
    values: Tensor | None

    @classmethod
    def of(cls, x: Tensor) -> "_Part":
        elements = _spread(x) if x.device.type == "cpu" else None
        values = None if elements is None else elements.clone()
        storage = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(_version(x), x.data_ptr(), x.shape, storage, elements, values)

    def holds(self, x: Tensor) -> bool:
        if self.version != _version(x) or self.address != x.data_ptr() or self.size != x.shape:
            return False
        if self.storage.cdata != x.untyped_storage()._cdata or is_uncounted(x):
            return False
        # Its address is still the same, so the alias may be read.
        return self.elements is None or self.values is None or torch.equal(self.elements, self.values)


def is_uncounted(x: Tensor) -> bool:
    """Return True for a tensor whose changes nothing shows: an inference tensor on a GPU."""
    return not x.is_cpu and x.is_inference()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _spread(x: Tensor) -> Tensor:
    """Return an alias of at most 1024 elements, as integers, spread over the memory of a tensor and over its rows and columns."""
    if not x.numel():
        return torch.empty(0)
    x = x.detach().view(_BITS[x.element_size()])
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    step = max(1, span // SAMPLE)
    row = min((s for s in x.stride() if s > 1), default=1)
    # A step of whole rows would stay in one column. The golden section visits them evenly.
    step = step - step % row + round(0.382 * row) if step >= row > 1 else step | 1
    return x.as_strided((min(SAMPLE, (span - 1) // step + 1),), (step,))
