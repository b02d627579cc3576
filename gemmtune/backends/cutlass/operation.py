"""An operation of CUTLASS's library as a value: element types, layouts, tile, schedule. Its name is CUTLASS's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

ELEMENTS: dict[str, torch.dtype] = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "f32": torch.float32,
    "f64": torch.float64,
    "s8": torch.int8,
    "u8": torch.uint8,
    "s32": torch.int32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s4": torch.uint8,
    "u4": torch.uint8,
}
"""CUTLASS's names of element types."""
ENCODED: dict[str, str] = {"s4": "int4", "u4": "uint4"}
"""CUTLASS's names of elements of four bits, two of which are in a byte of torch's uint8, and ours."""
FAST_ACCUM = "FP8FastAccum"
"""The end of a schedule's name where sums of 8-bit floats stay in the tensor cores."""
BLOCKWISE = "FP8Blockwise"
"""The end of a schedule's name where they are scaled before they are added to others."""

SASS_SUFFIX = {"bf16": ".BF16", "tf32": ".TF32", "e4m3": ".E4M3", "e5m2": ".E5M2"}
"""What follows the type of the sum in the name of an instruction, by the element of the operands."""


def bits_of(element: str) -> int:
    """How wide an element is."""
    return 4 if element in ENCODED else 8 * ELEMENTS[element].itemsize


def bytes_of(element: str, count: int) -> int:
    """The memory of ``count`` elements."""
    return bits_of(element) * count // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScales:
    """Scales of blocks of an operand, ``extent`` of its rows (of a) or columns (of b) by SCALE_BLOCK along K.

    ``along_k``: neighbours in memory are neighbours along K, otherwise across it.
    """

    extent: int
    along_k: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScales:
    """Scales of groups of elements along K of a row of the first operand: (a − zero) · scale, both of type ``element``."""

    element: str
    zero: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """d[M, N] = a[M, K] @ b[K, N] with an epilogue, compiled for one tile.

    Layouts are CUTLASS's letters: ``t`` row-major, ``n`` column-major. Alignments are in elements. ``modern`` operations are
    CUTLASS 3.x (SM90 and later), the others 2.x; ``introduced`` is the compute capability that an operation needs.
    """

    name: str
    modern: bool
    introduced: int
    a: str
    b: str
    c: str
    d: str
    accumulator: str
    layout_a: str
    layout_b: str
    layout_d: str
    alignment_a: int
    alignment_b: int
    alignment_d: int
    tile: tuple[int, int, int]
    cluster: tuple[int, int, int]
    stages: int
    warps: tuple[int, int, int]
    instruction: tuple[int, int, int]
    opcode: str
    math: str
    kernel_schedule: str
    epilogue_schedule: str
    scheduler: str
    scales_a: BlockScales | None = None
    scales_b: BlockScales | None = None
    """Both or none: the main loop multiplies sums over SCALE_BLOCK elements by scales of blocks."""
    weights: WeightScales | None = None
    """The scales of a, by which the main loop multiplies it where it converts it."""
    shuffled: bool = False
    """a is prepacked, in the order in which threads have it in registers: ``shuffle.py``."""
    slices: int = 1
    """Consumer warp groups of a block that take turns with the steps of one tile, and add up their sums."""
    grouped: bool = False
    """Products of groups of rows of one operand: the device reads where each group is, and how many rows it has."""

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Operation:
        """An operation out of a mapping that ``listing.py`` printed."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        return cls(**values)

    @property
    def stream_k(self) -> bool:
        """Tiles are divided among multiprocessors along K as well."""
        return self.scheduler == "StreamK"

    @property
    def transposes(self) -> bool:
        """The kernel computes d^T = b^T @ a^T with the tile as it is: those of CUTLASS 2.x store rows."""
        return not self.modern and self.layout_d == "n"

    @property
    def cooperative(self) -> bool:
        """Two consumer warp groups share a tile; in the ``pingpong`` schedule each has its own."""
        return "Cooperative" in self.kernel_schedule

    @property
    def tma_store(self) -> bool:
        """The epilogue writes through shared memory and TMA, and can be an epilogue visitor tree."""
        return self.modern and "NoSmem" not in self.epilogue_schedule

    @property
    def multiplied(self) -> str:
        """The element that tensor cores read: of two different ones, the narrower is converted to the wider."""
        return self.a if bits_of(self.a) >= bits_of(self.b) else self.b

    @property
    def converts(self) -> bool:
        """The first operand goes through registers, in which it becomes what the second one is."""
        return bits_of(self.a) < bits_of(self.b)

    @property
    def overlaps(self) -> bool:
        """A launch may begin before the kernel ahead of it has ended.

        Not where scales of blocks are loaded by the ``cooperative`` kernel: in CUTLASS 4.2, the warp that loads them does not wait
        for that end (``sm90_gemm_tma_warpspecialized_cooperative.hpp``). Nor do kernels of groups, which read what the one ahead of
        them wrote (``sm90_gemm_array_tma_warpspecialized_*.hpp``).
        """
        return not self.grouped and not (self.scales_a and self.cooperative)

    @property
    def columns_grouped(self) -> bool:
        """Groups of rows are columns here: the product is the transpose."""
        return self.grouped and self.layout_d == "n"

    @property
    def promotes(self) -> bool:
        """Sums of 8-bit floats are added to a second set of accumulators, every 128 elements of K."""
        floats = ELEMENTS[self.multiplied].is_floating_point and ELEMENTS[self.multiplied].itemsize == 1
        return floats and not self.kernel_schedule.endswith(FAST_ACCUM)

    @property
    def mainloop_bytes(self) -> int:
        """Shared memory of the stages of a and b; 0 for 3.x operations, which have as many stages as fit."""
        sizes = bytes_of(self.a, self.tile[0] * self.tile[2]) + bytes_of(self.b, self.tile[1] * self.tile[2])
        return 0 if self.modern else self.stages * sizes

    @property
    def accumulators_per_thread(self) -> int:
        """32-bit registers that hold the sums."""
        threads = (256 if self.cooperative else 128) if self.modern else 32 * self.warps[0] * self.warps[1] * self.warps[2]
        sets = 2 if self.promotes else 1
        return sets * self.tile[0] * self.tile[1] * ELEMENTS[self.accumulator].itemsize // 4 // threads

    @property
    def scales_per_thread(self) -> int:
        """Registers that hold scales of blocks in the main loop: each thread has sums of every fourth column."""
        return self.tile[1] // 4 if self.scales_b and self.scales_b.extent == 1 else 0

    @property
    def sass(self) -> str:
        """The SASS instruction that multiplies, with ``*`` for its shape: CUDA Binary Utilities, sm75 to sm90."""
        if self.opcode == "Simt":
            return "DFMA*" if self.a == "f64" else "FFMA*"
        if self.a == "f64":
            return "DMMA*"
        group = "G" if self.modern else ""
        if self.multiplied == "s8":
            return f"I{group}MMA.*.S8.S8*"
        letter = "Q" if bits_of(self.multiplied) == 8 else "H"
        suffix = [SASS_SUFFIX.get(x, "") for x in ((self.a, self.b) if letter == "Q" else (self.multiplied,))]
        return f"{letter}{group}MMA.*.F32{''.join(suffix)}"
