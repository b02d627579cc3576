"""Instances of CK's pipelined GEMM that are worth compiling: tile, waves, matrix instruction, pipeline.

This module is pure data. Depths are in bytes along K, so that one table serves operands of one, two and four bytes. Tiles and
pipelines come from CK's own lists for compute-bound and for memory-bound products.
"""

from dataclasses import dataclass
from typing import Literal

WAVE = 64
"""Threads of a wavefront on CDNA."""

Version = Literal["v1", "v2", "v3", "v4", "v5"]
Scheduler = Literal["intrawave", "interwave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Tile, and how a block of threads works on it.

    ``mfma`` is the side of the matrix instruction's square result. ``waves`` are along M and N. ``version`` is CK's name for a
    pipeline. The ``scheduler`` interleaves the instructions of one wave (intrawave), or several waves interleave (interwave).
    """

    block_m: int
    block_n: int
    bytes_k: int
    mfma: int
    waves: tuple[int, int]
    version: Version
    scheduler: Scheduler = "intrawave"

    @property
    def threads(self) -> int:
        return WAVE * self.waves[0] * self.waves[1]

    @property
    def repeats(self) -> tuple[int, int]:
        """Instruction results that one wave computes along M and N."""
        return self.block_m // (self.mfma * self.waves[0]), self.block_n // (self.mfma * self.waves[1])

    def block_k(self, itemsize: int) -> int:
        return self.bytes_k // itemsize

    @property
    def waves_per_simd(self) -> int:
        """Waves per SIMD for which CK makes the compiler leave registers."""
        if self.scheduler == "interwave":
            return 2
        return 2 if self.version == "v3" and self.block_m * self.block_n // self.threads <= 128 else 1

    def label(self, itemsize: int) -> str:
        waves = f"{self.waves[0]}x{self.waves[1]}"
        tile = f"{self.block_m}x{self.block_n}x{self.block_k(itemsize)}"
        return f"{tile}_x{self.mfma}_w{waves}_{self.version}_{self.scheduler}"


def _large(block_m: int, block_n: int, bytes_k: int, *versions: Version, mfma: int = 32) -> tuple[Instance, ...]:
    waves = (2, 2)
    return tuple(
        Instance(block_m=block_m, block_n=block_n, bytes_k=bytes_k, mfma=mfma, waves=waves, version=version) for version in versions
    )


def _small(block_m: int, block_n: int, bytes_k: int, mfma: int, waves: tuple[int, int]) -> tuple[Instance, ...]:
    """Return tiles for memory-bound products: loads of several steps are in flight, and waves take turns."""
    kinds: tuple[tuple[Version, Scheduler], ...] = (("v1", "intrawave"), ("v2", "intrawave"), ("v2", "interwave"))
    return tuple(
        Instance(block_m=block_m, block_n=block_n, bytes_k=bytes_k, mfma=mfma, waves=waves, version=version, scheduler=scheduler)
        for version, scheduler in kinds
    )


def _interwave(block_m: int, block_n: int, bytes_k: int) -> Instance:
    return Instance(block_m=block_m, block_n=block_n, bytes_k=bytes_k, mfma=32, waves=(2, 2), version="v1", scheduler="interwave")


INSTANCES: tuple[Instance, ...] = (
    *_large(256, 256, 64, "v3", "v4", "v5"), *_large(256, 256, 64, "v3", mfma=16), *_large(256, 128, 128, "v3"),
    *_large(128, 256, 128, "v3"), *_large(256, 128, 64, "v3", "v5"), *_large(128, 256, 64, "v3", "v5"),
    *_large(128, 128, 128, "v3", "v4", "v5"), *_large(128, 128, 128, "v3", mfma=16), *_large(128, 128, 64, "v3", "v4"),
    *_large(128, 64, 128, "v3", "v4"), *_large(64, 128, 128, "v3", "v4"), *_large(64, 64, 128, "v1", "v3"),
    _interwave(256, 128, 64), _interwave(128, 256, 64), _interwave(128, 128, 128), *_small(16, 16, 256, 16, (1, 1)),
    *_small(32, 16, 128, 16, (2, 1)), *_small(16, 32, 128, 16, (1, 2)), *_small(64, 16, 128, 16, (2, 1)),
    *_small(16, 64, 128, 16, (1, 2)), *_small(128, 16, 128, 16, (2, 1)), *_small(16, 128, 128, 16, (1, 2)),
    *_small(64, 32, 128, 32, (2, 1)), *_small(32, 64, 128, 32, (1, 2)), *_small(128, 32, 128, 32, (2, 1)),
    *_small(32, 128, 128, 32, (1, 2)), *_small(16, 256, 128, 16, (1, 4)), *_small(256, 16, 128, 16, (4, 1)),
    *_small(32, 256, 128, 32, (1, 4)), *_small(256, 32, 128, 32, (4, 1)),
)  # fmt: skip
"""Every instance; the predicate in ``legality.py`` selects those for a problem."""
