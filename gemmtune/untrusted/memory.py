"""Memory of the caller in which an untrusted process finds its operands and leaves its result."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..declaration.subject import Impossible
from ..errors import UnavailableError

CPU_BYTES, GPU_BYTES = 2**32, 2**30
"""Least size of the memory. On a CPU only what is used takes any."""
OF_FREE = 2
"""Part of a GPU's free memory, as a divisor, that larger operands may take."""
PAGE, ALIGNED = 4096, 256
PLACES = 256
"""Number of pages at which operands may begin."""
COUNTER = slice(4, 6)
"""Words of a handle that name the counter of its users, in the order of torch's ``_share_cuda_``."""
MOST_OPERANDS = 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of the memory: a process that cut it off would end the caller at its next look."""
GUARD, GUARD_BYTES = 0xA5, 64
"""Value and number of the bytes after each operand."""
POISON = 0xFF
"""Byte that fills the place of a result before a call: NaN in every float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Copy of a storage in the memory, at the byte ``at``."""

    own: torch.Tensor
    """Bytes of the caller's storage."""
    copy: torch.Tensor
    at: int
    guard: torch.Tensor
    """Bytes after the copy, which nobody has a reason to write."""

    def changed(self) -> bool:
        """Return True if the copy differs from the storage."""
        if self.own.is_cuda:
            return not torch.equal(self.own, self.copy)
        return not np.array_equal(self.own.numpy(), self.copy.numpy())  # torch takes ten times as long for bytes

    def overrun(self) -> bool:
        """Return True if the guard was written."""
        return not bool((self.guard == GUARD).all())


class Memory:
    """Bytes that this process and an untrusted one see, on the CPU or on a GPU.

    Raises:
        UnavailableError: the GPU has no room for them.
    """

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self.fd = os.memfd_create("operands", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        self.device = device
        self._shared: list[tuple[Any, ...]] = []
        weakref.finalize(self, _taken_back, self._shared)
        self.size = max(size, CPU_BYTES if device.type == "cpu" else GPU_BYTES)
        if device.type == "cpu":
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self.fd, self.size)
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        else:
            self.bytes = _on_gpu(self.size, device)

    def grown(self, operand_bytes: int, result_bytes: int) -> Memory:
        """Return this memory if operands and a result of these sizes fit, or a larger one on a GPU.

        Raises:
            Impossible: there is no room for it.
        """
        placed = operand_bytes + PLACES * PAGE + MOST_OPERANDS * 2 * PAGE
        size = max(2 * placed, placed + result_bytes)
        if size <= self.size:
            return self
        room = CPU_BYTES if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0] // OF_FREE
        if size > room:
            raise Impossible(f"its operands and its result need {size // 2**20} MiB, expected at most {room // 2**20} MiB")
        return Memory(self.device, size)

    def handle(self) -> list[object]:
        """Return the words by which another process opens the memory of a GPU."""
        if self.device.type == "cpu":
            return []
        words = self.bytes.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        self._shared.append(words)
        return [{"hex": x.hex()} if isinstance(x, bytes) else x for x in words]

    def take_back(self) -> None:
        """Count no process as a user of the memory any longer. One that was killed did not say that it stopped."""
        _taken_back(self._shared)

    def place(self, tensors: Sequence[torch.Tensor], at: int | None = None) -> tuple[dict[int, Placed], int]:
        """Copy the storages of tensors. Return them by their address, and the first byte after them.

        They begin at the page ``at``, or at any page, and keep their alignment.

        Raises:
            Impossible: they do not fit.
        """
        end = (secrets.randbelow(PLACES) if at is None else at) * PAGE
        placed: dict[int, Placed] = {}
        for own in _storages(tensors):
            begin = -(-end // PAGE) * PAGE + own.data_ptr() % ALIGNED
            after = begin + own.numel()
            end = after + GUARD_BYTES
            if end > self.size // 2:
                raise Impossible(f"its operands have more than {self.size // 2**21} MiB with the gaps between rows")
            copy, guard = self.bytes[begin:after], self.bytes[after:end].fill_(GUARD)
            copy.copy_(own)
            placed[own.data_ptr()] = Placed(own=own, copy=copy, at=begin, guard=guard)
        return placed, -(-end // PAGE) * PAGE

    def result(self, at: int, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of a result at the byte ``at``."""
        count = torch.Size(size).numel()
        return self.bytes[at : at + count * dtype.itemsize].view(dtype).view(list(size))

    def poison(self, at: int, nbytes: int) -> None:
        """Fill the place of a result."""
        self.bytes[at : at + nbytes].fill_(POISON)


def _on_gpu(size: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise UnavailableError(f"{device}: got no {size // 2**20} MiB of memory to share with the process of a GEMM") from error


def _taken_back(shared: list[tuple[Any, ...]]) -> None:
    release: Any = torch.UntypedStorage._release_ipc_counter_cuda
    while shared:
        release(*shared.pop()[COUNTER])


def _storages(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of each storage once."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
