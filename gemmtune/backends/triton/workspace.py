"""Memory for kernels that split a sum: partial sums, and counters that are zero between launches.

Each split of a tile increments the tile's counter, and the last to arrive resets it to zero. So two launches may share counters
only if one ends before the other begins. This holds for launches on one stream, or nodes of one captured stream of one CUDA graph.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import UnavailableError
from ...problem.layout import ALIGNED_BYTES
from ...threads import in_a_thread
from ...toolchain.driver import find_driver
from ...toolchain.hip import find_hip
from ...toolchain.kept import kept

ARENA_COUNTERS = 1 << 18
COUNTER_BYTES = 4


@dataclass(kw_only=True)
class Workspace:
    """Buffers of bound kernels on GPU ``device``: ``size_bytes`` of partial sums and ``counters`` 32-bit counters."""

    device: int
    size_bytes: int
    counters: int
    _by_stream: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Round up, so that the next slice of the arena stays aligned.
        self.counters = -(-self.counters * COUNTER_BYTES // ALIGNED_BYTES) * ALIGNED_BYTES // COUNTER_BYTES
        arena_of(self.device).reserve(self.counters)

    def acquire(self, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (partial sums, counters) for one launch on the current stream with handle ``stream``, kept for its next launch.

        A capture gets both for itself, because its replays may run concurrently with anything.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._partials(), arena_of(self.device).for_capture(stream, self.counters)
        buffers = self._by_stream.get(stream)
        if buffers is None:
            buffers = self._by_stream[stream] = kept(lambda: (self._partials(), self._zeros()), self.device, stream)
        return buffers

    def _partials(self) -> torch.Tensor:
        return torch.empty(self.size_bytes, dtype=torch.uint8, device=f"cuda:{self.device}")

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self.counters, dtype=torch.int32, device=f"cuda:{self.device}")


_workspaces: weakref.WeakValueDictionary[tuple[int, int, int, int], Workspace] = weakref.WeakValueDictionary()
BUFFERS = ("workspace", "counters")
"""Kernel argument names of the memory in ``Buffers``, in the order in which it is acquired."""
Acquire = Callable[[int], Sequence[torch.Tensor]]
"""Function from a stream's handle to the buffers of a launch on it. They must stay alive until the launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Memory that a kernel needs in addition to its operands: ``partials`` elements of ``dtype``, and ``counters`` kept at zero."""

    dtype: torch.dtype
    partials: int = 0
    counters: int = 0

    @property
    def size_bytes(self) -> int:
        return self.partials * self.dtype.itemsize + self.counters * COUNTER_BYTES

    def interpreted(self) -> Sequence[torch.Tensor]:
        """Return the buffers on the CPU. Partial sums start with a value that shows in a result if it was never overwritten."""
        unwritten = torch.nan if self.dtype.is_floating_point else torch.iinfo(self.dtype).max // 3
        return (
            torch.full((self.partials,), unwritten, dtype=self.dtype, device="cpu"),
            torch.zeros(self.counters, dtype=torch.int32, device="cpu"),
        )

    def on(self, device: int, kernel: object) -> Acquire:
        """Return the buffers of ``kernel`` on a GPU, shared by its launches of about the same size, whatever their M."""
        size_bytes, counters = (_power_of_two(x) for x in (self.partials * self.dtype.itemsize, self.counters))
        workspace = _workspaces.get((id(kernel), device, size_bytes, counters))
        if workspace is None:
            workspace = Workspace(device=device, size_bytes=size_bytes, counters=counters)
            _workspaces[id(kernel), device, size_bytes, counters] = workspace
        return workspace.acquire


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


class _Arena:
    """Counters zeroed before any capture began, handed out in slices that are never reclaimed."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._lock = threading.Lock()
        self._free: torch.Tensor = torch.empty(0, dtype=torch.int32)
        self._kept: list[torch.Tensor] = []
        self._slices: dict[tuple[int, int], torch.Tensor] = {}

    def reserve(self, counters: int) -> None:
        """Make sure, outside a capture, that the next captures find ``counters``."""
        with self._lock:
            if self._free.numel() < counters and not torch.cuda.is_current_stream_capturing():
                self._free = in_a_thread(lambda: self._zeros(max(ARENA_COUNTERS, counters)))  # in no graph's pool
                self._kept.append(self._free)
                torch.cuda.synchronize(self._device)

    def for_capture(self, stream: int, counters: int) -> torch.Tensor:
        """Return counters for the current capture: one slice per captured stream, or new ones that the graph itself zeroes."""
        capture = _capture_id(stream)
        with self._lock:
            known = self._slices.get((capture, stream)) if capture else None
            if known is not None and known.numel() >= counters:
                return known
            if not capture or self._free.numel() < counters:
                return self._zeros(counters)
            taken, self._free = self._free[:counters], self._free[counters:]
            self._slices[capture, stream] = taken
            return taken

    def _zeros(self, counters: int) -> torch.Tensor:
        return torch.zeros(counters, dtype=torch.int32, device=self._device)


@functools.cache
def arena_of(device: int) -> _Arena:
    return _Arena(device)


def _capture_id(stream: int) -> int:
    """Return the driver's number of the capture that ``stream`` takes part in; 0 if it is unknown."""
    try:
        return (find_driver() if torch.version.hip is None else find_hip()).capture(stream)
    except UnavailableError:
        return 0
