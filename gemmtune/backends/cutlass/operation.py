"""Operation of CUTLASS's library as a value: element types, layouts, tile, schedule. Its name is CUTLASS's own."""

from dataclasses import dataclass
from typing import Any

import torch

ELEMENTS: dict[str, torch.dtype] = {
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "f32": torch.float32, "f64": torch.float64,
    "s8": torch.int8, "u8": torch.uint8, "s32": torch.int32, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip
"""Torch dtypes by CUTLASS's element names."""
FAST_ACCUM = "FP8FastAccum"
"""Schedule suffix for sums of 8-bit floats that stay in the tensor cores."""
SASS_SUFFIX = {"bf16": ".BF16", "tf32": ".TF32", "e4m3": ".E4M3", "e5m2": ".E5M2"}
"""Suffix after the accumulator type in an instruction's name, by operand element."""


def bytes_of(element: str, count: int = 1) -> int:
    return ELEMENTS[element].itemsize * count


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Operation d[M, N] = a[M, K] @ b[K, N] with an epilogue, compiled for one tile.

    Layouts are CUTLASS's letters: ``t`` row-major, ``n`` column-major. Alignments are in elements. ``modern`` operations are
    CUTLASS 3.x (SM90 and later), the others 2.x. ``introduced`` is the compute capability that an operation needs.
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

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Operation":
        """Build an operation from a mapping that ``listing.py`` printed."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        return cls(**values)

    @property
    def stream_k(self) -> bool:
        """True if tiles are also divided along K among multiprocessors."""
        return self.scheduler == "StreamK"

    @property
    def transposes(self) -> bool:
        """True if the kernel computes d^T = b^T @ a^T with the same tile, because CUTLASS 2.x kernels store rows."""
        return not self.modern and self.layout_d == "n"

    @property
    def cooperative(self) -> bool:
        """True if two consumer warp groups share a tile. In the ``pingpong`` schedule each has its own."""
        return "Cooperative" in self.kernel_schedule

    @property
    def tma_store(self) -> bool:
        """True if the epilogue writes through shared memory and TMA, and can be an epilogue visitor tree."""
        return self.modern and "NoSmem" not in self.epilogue_schedule

    @property
    def multiplied(self) -> str:
        """Element that tensor cores read. If the operands differ, the narrower one is converted to the wider."""
        return self.a if bytes_of(self.a) >= bytes_of(self.b) else self.b

    @property
    def converts(self) -> bool:
        """True if the first operand is converted in registers to the type of the second one."""
        return bytes_of(self.a) < bytes_of(self.b)

    @property
    def promotes(self) -> bool:
        """True if sums of 8-bit floats are added to a second set of accumulators, every 128 elements of K."""
        floats = ELEMENTS[self.multiplied].is_floating_point and ELEMENTS[self.multiplied].itemsize == 1
        return floats and not self.kernel_schedule.endswith(FAST_ACCUM)

    @property
    def mainloop_bytes(self) -> int:
        """Shared memory of the stages of a and b. It is 0 for 3.x operations, which use as many stages as fit."""
        sizes = bytes_of(self.a, self.tile[0] * self.tile[2]) + bytes_of(self.b, self.tile[1] * self.tile[2])
        return 0 if self.modern else self.stages * sizes

    @property
    def accumulators_per_thread(self) -> int:
        """32-bit registers that hold a thread's sums."""
        threads = (256 if self.cooperative else 128) if self.modern else 32 * self.warps[0] * self.warps[1] * self.warps[2]
        sets = 2 if self.promotes else 1
        return sets * self.tile[0] * self.tile[1] * ELEMENTS[self.accumulator].itemsize // 4 // threads

    @property
    def sass(self) -> str:
        """SASS name of the multiplying instruction, with ``*`` for its shape: CUDA Binary Utilities, sm75 to sm90."""
        if self.opcode == "Simt":
            return "DFMA*" if self.a == "f64" else "FFMA*"
        if self.a == "f64":
            return "DMMA*"
        group = "G" if self.modern else ""
        if self.multiplied == "s8":
            return f"I{group}MMA.*.S8.S8*"
        letter = "Q" if bytes_of(self.multiplied) == 1 else "H"
        suffix = [SASS_SUFFIX.get(x, "") for x in ((self.a, self.b) if letter == "Q" else (self.multiplied,))]
        return f"{letter}{group}MMA.*.F32{''.join(suffix)}"
