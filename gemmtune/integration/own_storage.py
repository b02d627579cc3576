"""Adjacent tensors in memory, each with a separate storage.

A storage begins at its tensor's first element and has exactly the tensor's bytes, so that saving, sharding and the detection of
tied weights see separate tensors.

CPU: the storages are pieces of one allocation, which lives as long as any of them. torch refuses to resize such a storage
(``untyped_storage().resize_``), like memory from numpy.
CUDA: the storages are separate blocks of torch's allocator at consecutive addresses. Each can be freed, resized, shared with
another process and recorded on a stream. Two blocks can be consecutive only if the first has a multiple of 512 bytes and the
allocator takes both from one segment. It keeps separate segments for blocks of up to 1 MiB and for larger ones.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.utils.dlpack import from_dlpack

Tensor = torch.Tensor
_TRIES = 4
"""Attempts to get consecutive blocks. Each failure uses up other free blocks that the allocator prefers."""


class Rows:
    """Allocator of adjacent tensors. On a GPU, one object has one memory pool of torch for each device."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, torch.cuda.MemPool] = {}

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Return adjacent copies of contiguous tensors of one device, or None if there is no such memory.

        The copies are inference tensors if the first tensor is one, whatever mode is active.
        """
        with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():
            pieces = self._pieces([x.nbytes for x in tensors], tensors[0].device)
            if pieces is None:
                return None
            for piece, x in zip(pieces, tensors, strict=True):
                piece.copy_(x.detach().reshape(-1).view(torch.uint8))
            return [piece.view(x.dtype).view(x.shape).data for piece, x in zip(pieces, tensors, strict=True)]

    def _pieces(self, sizes: Sequence[int], device: torch.device) -> list[Tensor] | None:
        if device.type == "cpu":
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            # DLPack's export of a slice begins at its first byte, and keeps the whole allocation alive.
            return [from_dlpack(piece) for piece in torch.split(memory, list(sizes))]
        if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
            return self._blocks(sizes, device)
        return None

    def _blocks(self, sizes: Sequence[int], device: torch.device) -> list[Tensor] | None:
        """Free one block of all bytes, then allocate the pieces. The allocator splits the block from front to back."""
        held: list[list[Tensor]] = []
        with torch.cuda.device(device):
            pool = self._pools[device] = self._pools.get(device) or torch.cuda.MemPool()
            for _ in range(_TRIES):
                with torch.cuda.use_mem_pool(pool, device):
                    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                    del whole
                    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
                if are_consecutive(blocks):
                    return blocks
                held.append(blocks)
        return None


def are_consecutive(tensors: Sequence[Tensor]) -> bool:
    """Return True if each of several contiguous tensors begins where the previous one ends."""
    return all(y.data_ptr() == x.data_ptr() + x.nbytes for x, y in pairwise(tensors))


def is_sole(x: Tensor) -> bool:
    """Return True if the tensor covers its storage, and no other tensor or process shares it.

    Other tensors may be views, entries of a ``state_dict``, or tensors that a graph keeps for its backward pass.
    """
    if x.layout is not torch.strided or x.is_meta or not x.numel():
        return False
    storage = x.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    alone = users == 2  # the tensor and ``storage``
    return alone and storage.nbytes() == x.nbytes and not (x.device.type == "cpu" and (storage.is_shared() or x.is_pinned()))
