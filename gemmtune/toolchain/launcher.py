"""Launches of records on CUDA: parameters are assembled once for each set of addresses, and a call is one driver call."""

import ctypes
import functools
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bounded import Bounded
from ..choice import Run, Scalars, Tensors
from ..errors import ErrorFromChoice
from ..problem import Problem
from .driver import CLUSTER_DIMENSION, INVALID_CONTEXT, PROGRAMMATIC_STREAM_SERIALIZATION, Attribute, Config, Driver, LoadedKernel
from .kept import is_ordered, kept
from .prepared import DriverLaunch, Memory
from .record import MAP_BYTES, Record

MOST_READY = 512
"""Maximum sets of addresses with cached parameters. Measurement alternates between up to 256 sets of operands."""
MOST_MAPS = 4096
"""Maximum number of cached tensor maps. A model has the same product with many weights."""
BLOCK_ALIGNMENT = 64


class Ready(NamedTuple):
    """A complete launch. ``kept`` only keeps the memory alive that the other fields point to."""

    arguments: Any
    kept: object
    config: Any = None


class RecordLauncher(ABC):
    """One record on one device, whose ``kernel`` either driver has loaded. Other threads launch it too, so it never changes."""

    def __init__(self, kernel: Any, record: Record, refuse: Callable[[str], ErrorFromChoice]) -> None:
        self.kernel, self.record, self._refuse = kernel, record, refuse
        self._ready = Bounded[tuple[object, ...], Ready](MOST_READY)

    @abstractmethod
    def launch(self, stream: int, addresses: tuple[int, ...], alpha: float, beta: float) -> None:
        """Launch on ``stream`` with ``addresses`` in the order of ``record``. Raise ErrorFromChoice if the driver refuses it."""

    def _filled(self, addresses: tuple[int, ...], scalars: tuple[float, float], maps: Sequence[bytes] = ()) -> Ready:
        memory, start = filled(self.record, addresses, scalars, maps)
        offsets = self.record.arguments
        return Ready((ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets)), memory)


class Launcher(RecordLauncher):
    """Launcher of a cubin's kernel."""

    def __init__(self, kernel: LoadedKernel, record: Record, refuse: Callable[[str], ErrorFromChoice]) -> None:
        super().__init__(kernel, record, refuse)
        self._driver, self._function, self._launch = kernel.driver, kernel.function, kernel.driver.call.cuLaunchKernelEx
        self._maps = Bounded[tuple[int, int], bytes](MOST_MAPS)
        if status := kernel.require(record.shared_bytes):
            raise refuse(self._driver.message(status))

    def launch(self, stream: int, addresses: tuple[int, ...], alpha: float, beta: float) -> None:
        key = (stream, addresses, alpha, beta)
        arguments, _, config = self._ready.get(key) or self._prepare(key, stream, addresses, (alpha, beta))
        status = self._launch(config, self._function, arguments, None)
        if status == INVALID_CONTEXT:  # the thread's first use of CUDA: no context is current to it
            status = self._driver.call.cuCtxSetCurrent(self.kernel.context) or self._launch(config, self._function, arguments, None)
        if status:
            raise self._refuse(self._driver.message(status))

    def _prepare(self, key: tuple[object, ...], stream: int, addresses: tuple[int, ...], scalars: tuple[float, float]) -> Ready:
        record = self.record
        maps = [self.map(i, addresses[one.operand]) for i, one in enumerate(record.maps)]
        arguments, memory, _ = self._filled(addresses, scalars, maps)
        config = _config(record, stream)
        self._ready[key] = ready = Ready(arguments, (memory, config), ctypes.byref(config))
        return ready

    def map(self, number: int, address: int) -> bytes:
        """Return the record's CUtensorMap ``number`` for data at ``address``. Raise ErrorFromChoice if the driver refuses it."""
        found = self._maps.get((number, address))
        if found is None:
            memory, start = _aligned_memory(MAP_BYTES)
            status = self._driver.encode(self.record.maps[number], address, start)
            if status:
                raise self._refuse(f"an operand cannot be described to TMA: {self._driver.message(status)}")
            found = ctypes.string_at(start, MAP_BYTES)
            del memory
            self._maps[number, address] = found
        return found


def filled(
    record: Record, addresses: tuple[int, ...], scalars: tuple[float, float], maps: Sequence[bytes] = ()
) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Return memory that holds the record's parameters, and the address at which they begin."""
    block = bytearray(record.parameters)
    for i, encoded in enumerate(maps):
        block[i * MAP_BYTES : (i + 1) * MAP_BYTES] = encoded
    for place in record.addresses:
        struct.pack_into("Q", block, place.offset, addresses[place.operand] + place.more_bytes)
    for scalar in record.scalars:
        struct.pack_into("d" if scalar.wide else "f", block, scalar.offset, scalars[scalar.number])
    for flag in record.aligned:
        if addresses[flag.operand] % flag.multiple_bytes:
            block[flag.offset] = 0
    memory, start = _aligned_memory(len(block))
    ctypes.memmove(start, bytes(block), len(block))
    return memory, start


def _aligned_memory(size: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Return memory, and the address in it at which ``size`` bytes begin, a multiple of 64."""
    memory = ctypes.create_string_buffer(size + BLOCK_ALIGNMENT)
    return memory, -(-ctypes.addressof(memory) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _config(record: Record, stream: int) -> Config:
    attributes = (Attribute * 2)()
    attributes[0].id, attributes[0].value.cluster[:] = CLUSTER_DIMENSION, (record.cluster, 1, 1)
    attributes[1].id, attributes[1].value.flag = PROGRAMMATIC_STREAM_SERIALIZATION, 1
    config = Config()
    config.grid[:], config.block[:], config.shared_bytes = record.grid, (record.threads, 1, 1), record.shared_bytes
    config.stream, config.attributes, config.attribute_count = stream, attributes, 2 if record.pdl else 1
    return config


class Workspace:
    """Zero-initialized memory for a kernel's launches: one part for each stream, and one for each capture, from its graph's pool.

    The memory of a capture is kept until the next capture on the same stream. A replayed graph zeroes it again. ``capture`` returns
    the number of the capture that a stream is in, 0 for none.
    """

    def __init__(self, capture: Callable[[int], int], size_bytes: int, device: int) -> None:
        self._capture = capture
        self.size_bytes = size_bytes
        self.device = device
        self._by_stream: dict[int, torch.Tensor] = {}
        self._by_capture: dict[int, tuple[int, torch.Tensor]] = {}

    def of_stream(self, stream: int) -> torch.Tensor:
        """Return the memory for launches on ``stream`` while no graph captures it."""
        memory = self._by_stream.get(stream)
        if memory is None:
            memory = self._by_stream[stream] = kept(self._new, self.device, stream)
        return memory

    def address(self, stream: int) -> int:
        """Return the address of the memory for launches on ``stream``."""
        capture = self._capture(stream)
        if capture == 0 or is_ordered(stream, self.device):
            return self.of_stream(stream).data_ptr()
        number, memory = self._by_capture.get(stream, (0, None))
        if memory is None or number != capture:
            memory = self._new()
            self._by_capture[stream] = (capture, memory)
        return memory.data_ptr()

    def _new(self) -> torch.Tensor:
        return torch.zeros(self.size_bytes, dtype=torch.uint8, device=torch.device("cuda", self.device))


_workspaces: weakref.WeakValueDictionary[tuple[int, int, int], Workspace] = weakref.WeakValueDictionary()


def shared_workspace(capture: Callable[[int], int], size_bytes: int, device: int, kernel: object) -> Workspace:
    """Return memory of at least that size, shared by all bindings of ``kernel``: launches run in order and leave it zero."""
    size_bytes = 1 << (size_bytes - 1).bit_length() if size_bytes else 0
    found = _workspaces.get((id(kernel), device, size_bytes))
    if found is None:
        found = _workspaces[id(kernel), device, size_bytes] = Workspace(capture, size_bytes, device)
    return found


def workspace_of(launcher: RecordLauncher) -> Workspace:
    kernel = launcher.kernel
    return shared_workspace(kernel.driver.capture, launcher.record.workspace_bytes, kernel.device, kernel)


def bind(
    launcher: RecordLauncher, problem: Problem, name: str, workspace: Workspace | None = None, before: Sequence[RecordLauncher] = ()
) -> Run:
    """Return a ``choice.Run`` on the current stream of the kernel's device, which launches ``before`` first."""
    record, device = launcher.record, launcher.kernel.device
    workspace = workspace or workspace_of(launcher)
    current_stream, needs_workspace = torch._C._cuda_getCurrentRawStream, record.workspace_bytes > 0
    scratch_bytes = record.scratch_bytes
    alignment, launch, without = record.alignment, launcher.launch, (1.0, 0.0)
    skipped, first = _skipped(problem), tuple(one.launch for one in before)

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        stream = current_stream(device)
        memory = workspace.address(stream) if needs_workspace else 0
        if scratch_bytes:  # the allocator reuses it on this stream only for work after these launches
            scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=out.device)
            memory = scratch.data_ptr()
        read = [x.data_ptr() for x in tensors]
        if skipped is not None:
            del read[skipped]
        addresses = (out.data_ptr(), memory, *read)
        for operand, multiple in alignment:
            if addresses[operand] % multiple:
                listed = " ".join(f"{address:#x}" for address in addresses)
                raise ErrorFromChoice(name, str(problem), f"an operand is not aligned as planned: {listed}")
        for launch_first in first:
            launch_first(stream, addresses, *(scalars or without))
        launch(stream, addresses, *(scalars or without))

    return run


def prepared(launcher: Launcher, problem: Problem, workspace: Workspace) -> DriverLaunch:
    kernel, record = launcher.kernel, launcher.record
    return DriverLaunch(
        record=record,
        launch=kernel.driver.address("cuLaunchKernelEx"),
        set_context=kernel.driver.address("cuCtxSetCurrent"),
        function=kernel.function,
        context=kernel.context,
        skipped=_skipped(problem),
        owner=(launcher, kernel.driver),
        memory=memory_of(workspace, kernel.driver),
        maps=tuple(one.operand for one in record.maps),
        encode=launcher.map,
        encode_map=kernel.driver.address("cuTensorMapEncodeTiled") if record.maps else 0,
    )


def memory_of(workspace: Workspace, driver: Driver) -> Memory | None:
    """Return the workspace as plain data; None for an empty one."""
    if not workspace.size_bytes:
        return None
    return Memory(
        tensors=lambda stream: (workspace.of_stream(stream),), capture=driver.capture_info, size_bytes=workspace.size_bytes
    )


def _skipped(problem: Problem) -> int | None:
    """Return the position of an inp that the kernel does not read. None if there is none."""
    return 2 if problem.inp is not None and problem.inp_read is None else None


@functools.lru_cache(maxsize=512)
def loaded_kernel(driver: Driver, path: Path, kernel: str, device: int) -> LoadedKernel:
    """Return the kernel of the cubin at ``path``, loaded once on a device. Raise UnavailableError if the driver refuses it."""
    return driver.load(path.read_bytes(), kernel, device)
