"""Launch descriptions of compiled kernels as plain data, for launchers in Python and in C++."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

OUT, WORKSPACE, A, B, OPERANDS = range(5)
"""Numbers of addresses: the result, the workspace, then the operands in the order of a call."""
MAP_BYTES = 128
"""The size of a CUtensorMap. Its own address is a multiple of half this size."""
MAP_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType by dtype."""


class Swizzle(IntEnum):
    """CUtensorMapSwizzle: the span of shared memory within which chunks of 16 bytes are exchanged."""

    NONE = 0
    BYTES_64 = 2
    BYTES_128 = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """TMA's view of an operand, contiguous dimension first: sizes and the box of one copy in elements, ``pitches`` in bytes."""

    operand: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE
    promotion_bytes: int = 128

    @property
    def data_type(self) -> int:
        return MAP_TYPES[self.dtype]

    @property
    def promotion(self) -> int:
        """The value of CUtensorMapL2promotion: the bytes that L2 fetches from memory at a time."""
        return {64: 1, 128: 2, 256: 3}[self.promotion_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An operand's address in the parameters: at ``offset``, with ``more_bytes`` added."""

    offset: int
    operand: int
    more_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A scalar of the call in the parameters at ``offset``: float32, or float64 if ``wide``. Number 0 is alpha, 1 is beta."""

    offset: int
    number: int
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """A byte of the parameters that is cleared if the operand's address is not a multiple of ``multiple_bytes``."""

    offset: int
    operand: int
    multiple_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A launch of the kernel named ``kernel``, for operands of one problem.

    ``parameters`` is the block of all argument bytes, which begins at a multiple of 64. ``arguments`` are the offsets of the
    arguments in it. ``maps`` lie at its beginning, in order. Maps, addresses and scalars are zero until a call fills them in. With
    ``pdl`` the launch may begin before the previous one has ended. The workspace is zero before the first launch, and each launch
    leaves its counters zero. Alternatively a call has ``scratch_bytes`` of its own with arbitrary content. The records in
    ``before`` are launched first with the same addresses. ``alignment`` holds pairs of an operand and the bytes of which its
    address is a multiple.
    """

    kernel: str
    grid: tuple[int, int, int]
    cluster: int
    threads: int
    shared_bytes: int
    pdl: bool
    parameters: bytes
    arguments: tuple[int, ...] = (0,)
    maps: tuple[TensorMap, ...] = ()
    addresses: tuple[Address, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    aligned: tuple[Aligned, ...] = ()
    workspace_bytes: int = 0
    scratch_bytes: int = 0
    before: "tuple[Record, ...]" = ()
    alignment: tuple[tuple[int, int], ...] = ()


def operand_at(index: int) -> int:
    """Return the number of the address of an operand after a and b."""
    return OPERANDS + index


def with_maps(record: Record, maps: Sequence[TensorMap]) -> Record:
    """Return the record with tensor maps as its first argument: a struct of them before all others."""
    first = MAP_BYTES * len(maps)
    return dataclasses.replace(
        record,
        parameters=bytes(first) + record.parameters,
        arguments=(0, *(offset + first for offset in record.arguments)),
        maps=tuple(maps),
        addresses=tuple(dataclasses.replace(x, offset=x.offset + first) for x in record.addresses),
        scalars=tuple(dataclasses.replace(x, offset=x.offset + first) for x in record.scalars),
        aligned=tuple(dataclasses.replace(x, offset=x.offset + first) for x in record.aligned),
    )
