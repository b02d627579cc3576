"""Scratch memory: one block for each device and stream, shared by every kernel, since the work of a stream never overlaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["NO_WORKSPACE", "Workspace", "workspace"]


@dataclass(frozen=True, slots=True)
class Workspace:
    """A block of device memory. Whoever launches with ``address`` holds this object until the launch is made."""

    address: int
    size_bytes: int
    memory: torch.Tensor | None


NO_WORKSPACE = Workspace(0, 0, None)
_blocks: dict[tuple[int, int], Workspace] = {}


def workspace(index: int, stream: int, size_bytes: int) -> Workspace:
    """A block of at least ``size_bytes`` for work on ``stream``, the current stream of the CUDA device ``index``.

    A graph that is being captured gets a block of its own, from its own memory pool: it may be replayed on any stream, next to
    calls that use the shared one.
    """
    if torch.cuda.is_current_stream_capturing():
        return _allocate(index, size_bytes)
    block = _blocks.get((index, stream), NO_WORKSPACE)
    if block.size_bytes < size_bytes:
        # The old block goes back to torch's allocator, which reuses it in the order of this stream only.
        block = _blocks[index, stream] = _allocate(index, size_bytes)
    return block


def _allocate(index: int, size_bytes: int) -> Workspace:
    memory = torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", index))
    return Workspace(memory.data_ptr(), size_bytes, memory)
