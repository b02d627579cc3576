"""What a launch of a compiled kernel is told, as plain data: whoever launches reads it, in Python or in C++."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

OUT, WORKSPACE, A, B, OPERANDS = range(5)
"""Numbers of addresses: those of the result and the workspace, then those of the operands in the order of a call."""
MAP_BYTES = 128
"""The size of a CUtensorMap, whose own address is a multiple of half of it."""
MAP_TYPES = {torch.uint8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType by dtype."""


class Swizzle(IntEnum):
    """CUtensorMapSwizzle: the span of shared memory within which chunks of 16 bytes are exchanged."""

    NONE = 0
    BYTES_64 = 2
    BYTES_128 = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """How TMA sees an operand: sizes and the box that one copy has in elements, the contiguous dimension first.

    ``pitches`` are the bytes from one line to the next along the other dimensions.
    """

    operand: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE
    promotion_bytes: int = 128

    @property
    def data_type(self) -> int:
        """The number of the dtype among those of CUtensorMapDataType."""
        return MAP_TYPES[self.dtype]

    @property
    def promotion(self) -> int:
        """CUtensorMapL2promotion: how many bytes L2 asks of memory at a time."""
        return {64: 1, 128: 2, 256: 3}[self.promotion_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The parameters have an operand's address at ``offset``, with ``more_bytes`` added to it."""

    offset: int
    operand: int
    more_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """The parameters have a scalar of the call as a float32 at ``offset``, a float64 if ``wide``: number 0 is alpha, 1 beta."""

    offset: int
    number: int
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """A byte of the parameters that is cleared where the operand's address is no multiple of ``multiple_bytes``."""

    offset: int
    operand: int
    multiple_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A launch of the kernel with the name ``kernel``, for operands of one problem.

    ``parameters`` is all that its arguments have, a block of bytes that begins at a multiple of 64; ``arguments`` says where in it
    each argument begins. ``maps`` are at its beginning, one after the other; they, addresses and scalars are zero until a call
    fills them in. With ``pdl`` the launch may begin before the one before it has ended. The workspace is zero before the first
    launch, and each leaves its counters so; or it is ``scratch_bytes`` of a call's own, with anything in it. What has to run
    ``before`` is launched with the same addresses. ``alignment``: the bytes that addresses of operands are multiples of.
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
    before: tuple[Record, ...] = ()
    alignment: tuple[tuple[int, int], ...] = ()


def operand_at(index: int) -> int:
    """The number of the address of an operand beside a and b."""
    return OPERANDS + index


def with_maps(record: Record, maps: Sequence[TensorMap]) -> Record:
    """The same with tensor maps as its first argument, a struct of them before all others."""
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
