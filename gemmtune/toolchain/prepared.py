"""Launches as plain data: what the native look-up does by itself, without the Python function that does the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..choice import Prepared
from .record import A, B, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """What of a plan of the cpp backend follows M, for plans that divide the rows of a.

    ``places`` are those of M, of the rows of a panel and of a block, of the panels of a task, and of the threads among its words;
    ``most`` what panels, blocks and tasks have at most. ``flops`` and ``bytes`` are the work for the M of the plan, and what of
    each makes a thread pay.
    """

    places: tuple[int, int, int, int, int]
    most: tuple[int, int, int]
    flops: int
    bytes: int
    per_thread: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFunction(Prepared):
    """A C function of a shared object of the cpp backend, at the address ``function``, with its plan of so many ``words`` at the
    address ``plan``.

    ``plain``: it is ``gemmtune_product``, else ``gemmtune_gemm``. ``swapped``: it is given b before a. ``added``: the third tensor
    is inp. ``rows`` tells how the plan follows M; None where it does otherwise. ``owner`` keeps code and plan in memory.
    """

    function: int
    plan: int
    words: int
    plain: bool
    swapped: bool
    added: bool
    owner: object
    rows: HostRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOperation(Prepared):
    """An operation of torch on the tensors and scalars of a call. ``inp`` says how it gets inp: as a ``vector`` of N, expanded to
    the ``matrix``, or as it is given."""

    operation: Literal["mm", "bmm", "addmm", "baddbmm"]
    inp: Literal["given", "vector", "matrix"] = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a launch needs beside its operands: ``tensors(stream)`` has it for launches on a stream, always the same.

    It is not asked while a graph captures the stream, whose launches have memory of their own: ``capture`` is the address of the
    driver's cuStreamGetCaptureInfo_v2, which tells. What needs no more ``size_bytes`` can do with the same.
    """

    tensors: Callable[[int], Sequence[torch.Tensor]]
    capture: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLaunch(Prepared):
    """What a record says, for the kernel ``function`` of a device's primary ``context``.

    ``launch`` and ``set_context`` are the addresses of the driver's cuLaunchKernelEx and cuCtxSetCurrent. ``skipped`` is the place
    of a tensor of the call that the record has no number for. The first tensor of ``memory`` is the workspace; all have numbers
    behind those of the call's tensors as well. ``maps`` are the operands of the tensor maps, and ``encode(number, address)`` makes
    the bytes of one; ``encode_map`` is the address of cuTensorMapEncodeTiled, which does where the record has the maps. ``owner``
    keeps the kernel loaded.
    """

    record: Record
    launch: int
    set_context: int
    function: int
    context: int
    skipped: int | None
    owner: object
    memory: Memory | None = None
    maps: tuple[int, ...] = ()
    encode: Callable[[int, int], bytes] | None = None
    encode_map: int = 0

    def swapped(self) -> DriverLaunch:
        """The same with b in the place of a, and a in that of b."""
        other = {A: B, B: A}
        addresses = tuple(replace(x, operand=other.get(x.operand, x.operand)) for x in self.record.addresses)
        maps = tuple(other.get(operand, operand) for operand in self.maps)
        return replace(self, record=replace(self.record, addresses=addresses), maps=maps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFunction(Prepared):
    """``gemmtune_call`` of a shared object of nvcc, at the address ``function``, with its plan of ``plan_bytes`` at the address
    ``plan``. ``need`` is the address of ``gemmtune_workspace_bytes``, which tells of a plan what memory it needs.

    Places among the tensors of a call: ``left``, ``right``, and from ``first`` on ``count`` others. ``alignment``: the bytes that
    the addresses of the result, of ``left`` and of ``right`` are multiples of. ``owner`` keeps code and plan in memory.
    """

    function: int
    plan: int
    left: int
    right: int
    first: int
    count: int
    alignment: tuple[int, int, int]
    need: int
    plan_bytes: int
    owner: object
    memory: Memory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryProduct(Prepared):
    """A call of cublasLtMatmul, which is at the address ``function``; ``set_attribute`` is that of cublasLtMatmulDescSetAttribute.

    ``operation`` and the layouts of the matrices are handles of its descriptors, ``algorithm`` the opaque bytes. ``scalar`` is the
    C type of alpha and beta as struct has it; None for one that the call has. ``left``, ``right`` and ``added``, which is C, are
    places among the tensors of a call. ``pointers`` are the attributes of the operation that hold the address of a tensor, with its
    place: nobody else sets those of this operation. ``owner`` keeps the descriptors.

    ``sizes`` are rows, columns, leading dimension and stride of a batch of each layout, ``look`` all else that is told of the
    product. ``check`` and ``set_size`` are the addresses of cublasLtMatmulAlgoCheck and of cublasLtMatrixLayoutSetAttribute; 0
    where they are not known.
    """

    function: int
    set_attribute: int
    handle: int
    operation: int
    layouts: tuple[int, int, int, int]
    algorithm: bytes
    workspace_bytes: int
    scalar: Literal["f", "d", "i"]
    alpha: float | None
    beta: float | None
    left: int
    right: int
    added: int | None
    pointers: tuple[tuple[int, int], ...]
    owner: object
    sizes: tuple[int, ...]
    look: Hashable
    check: int = 0
    set_size: int = 0
    memory: Memory | None = None
