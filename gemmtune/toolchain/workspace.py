"""Device memory that compiled kernels keep between launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Workspace"]


class Workspace:
    """Memory of one bound kernel, zero to begin with: some for each stream, and other for each capture, from its graph's pool.

    That of a capture is kept until the next one on the same stream: a graph that is replayed zeroes it anew. ``capture`` gives the
    number of the capture that a stream is in, 0 for none.
    """

    def __init__(self, capture: Callable[[int], int], size_bytes: int, device: int) -> None:
        self._capture = capture
        self.size_bytes = size_bytes
        self._device = torch.device("cuda", device)
        self._by_stream: dict[int, torch.Tensor] = {}
        self._by_capture: dict[int, tuple[int, torch.Tensor]] = {}

    def address(self, stream: int) -> int:
        """The address of the memory for launches on ``stream``."""
        capture = self._capture(stream)
        if capture == 0:
            memory = self._by_stream.get(stream)
            if memory is None:
                memory = self._by_stream[stream] = self._new()
            return memory.data_ptr()
        number, memory = self._by_capture.get(stream, (0, None))
        if memory is None or number != capture:
            memory = self._new()
            self._by_capture[stream] = (capture, memory)
        return memory.data_ptr()

    def _new(self) -> torch.Tensor:
        return torch.zeros(self.size_bytes, dtype=torch.uint8, device=self._device)
