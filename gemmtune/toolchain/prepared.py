"""Launches as plain data, which the native look-up executes without the equivalent Python function."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..choice import Prepared
from .record import A, B, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """The parts of a cpp plan that follow M, for plans that divide the rows of a.

    ``places`` are indices of plan words: M, the rows of a panel, the rows of a block, the panels of a task, and the threads.
    ``most`` are the largest panel, block and task. ``flops`` and ``bytes`` are the work for the plan's M. ``per_thread`` is how
    much of each justifies a thread.
    """

    places: tuple[int, int, int, int, int]
    most: tuple[int, int, int]
    flops: int
    bytes: int
    per_thread: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFunction(Prepared):
    """A C function of a shared object of the cpp backend, at the address ``function``. Its plan has ``words`` words at ``plan``.

    ``plain`` means ``gemmtune_product``, otherwise ``gemmtune_gemm``. ``swapped`` passes b before a. ``added`` means that the third
    tensor is inp. ``rows`` describes how the plan follows M, and is None if it does not follow these rules. ``owner`` keeps code
    and plan in memory.
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
    """An operation of torch on a call's tensors and scalars. ``inp`` is ``vector`` [N], ``matrix``, its expansion, or ``given``."""

    operation: Literal["mm", "bmm", "addmm", "baddbmm"]
    inp: Literal["given", "vector", "matrix"] = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a launch in addition to its operands. ``tensors(stream)`` returns the same tensors for all launches on a stream.

    A captured stream does not use it, because its launches have memory of their own. ``capture`` is the address of the driver's
    cuStreamGetCaptureInfo_v2, which detects this. Launches that need at most ``size_bytes`` can share it.
    """

    tensors: Callable[[int], Sequence[torch.Tensor]]
    capture: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLaunch(Prepared):
    """A launch of a record, for the kernel ``function`` in a device's primary ``context``.

    ``launch`` and ``set_context`` are the addresses of the driver's cuLaunchKernelEx and cuCtxSetCurrent. ``skipped`` is the
    position of a tensor of the call without a number in the record. The first tensor of ``memory`` is the workspace. All tensors of
    ``memory`` also have numbers after those of the call's tensors. ``maps`` are the operands of the tensor maps, and
    ``encode(number, address)`` returns the bytes of one. ``encode_map`` is the address of cuTensorMapEncodeTiled, used if the
    record has the maps. ``owner`` keeps the kernel loaded.
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

    def swapped(self) -> "DriverLaunch":
        """Return the launch with a and b exchanged."""
        other = {A: B, B: A}
        addresses = tuple(replace(x, operand=other.get(x.operand, x.operand)) for x in self.record.addresses)
        maps = tuple(other.get(operand, operand) for operand in self.maps)
        return replace(self, record=replace(self.record, addresses=addresses), maps=maps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFunction(Prepared):
    """``gemmtune_call`` of a shared object of nvcc, at the address ``function``. Its plan has ``plan_bytes`` at ``plan``.

    ``need`` is the address of ``gemmtune_workspace_bytes``, which returns the memory that a plan needs. Positions among the tensors
    of a call are ``left``, ``right``, and ``count`` others from ``first``. ``alignment`` holds the bytes of which the addresses of
    the result, of ``left`` and of ``right`` are multiples. ``owner`` keeps code and plan in memory.
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
    """A call of cublasLtMatmul at the address ``function``. ``set_attribute`` is the address of cublasLtMatmulDescSetAttribute.

    ``operation`` and ``layouts`` are descriptor handles, and ``algorithm`` is cuBLASLt's opaque bytes. ``scalar`` is the struct
    code of alpha's and beta's C type. ``alpha`` or ``beta`` is None if the call provides it. ``left``, ``right`` and ``added``,
    which is C, are positions among the tensors of a call. ``pointers`` are the operation's attributes that hold a tensor's address,
    with the tensor's position. No other code sets these attributes of this operation. ``owner`` keeps the descriptors.

    ``sizes`` are rows, columns, leading dimension and batch stride of each layout. ``look`` is everything else that defines the
    product. ``check`` and ``set_size`` are the addresses of cublasLtMatmulAlgoCheck and cublasLtMatrixLayoutSetAttribute, or 0 if
    they are unknown.
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
