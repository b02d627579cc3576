"""Shapes and configs of the wgmma kernels for many rows times narrow weights."""

from dataclasses import dataclass

from ..hopper import SMEM_BYTES, SYSTEM_BYTES, WGMMA_M, registers_per_thread
from ..mixed.weights import MixedConfig, Weights

BARRIERS_BYTES = 1024
"""Space reserved for barriers. It keeps the stages aligned for swizzling."""
MANY_SUMS = 64
"""Most sums per thread that need no registers of the copying warps."""
LEFT_REGISTERS = 240
"""Registers of a multiplying thread that gets registers of the copying warps."""
BASE_REGISTERS = 62
"""Registers of a thread in addition to sums, scales and zero points: numbers in flight, and addresses."""
K16_BATCH = 4
"""Default number of wgmma instructions issued together."""
EXTRA_COLS = 4
"""Padding between rows of sums in shared memory. It spreads a warp's stores over all banks."""
CHUNK_BYTES = 16
"""Bytes that a thread stores at once: result elements, or float32 sums before an epilogue."""
CLUSTER_SIZES = (1, 2, 3, 4)
"""Cluster sizes that divide K. With more blocks, adding up takes longer than multiplying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tile of ``block_m`` rows of a by 64 columns of b for each of ``col_tiles`` of each of ``warp_groups``.

    A stage has ``line_bytes`` of each column. ``blocks_per_sm`` blocks share a multiprocessor. ``k16_batch`` is the number of K
    steps of 16 issued together, or 0 for a good default. A cluster has ``cluster_n`` tiles side by side, whose blocks copy the rows
    of a once (multicast).
    """

    block_m: int
    warp_groups: int
    col_tiles: int
    line_bytes: int
    stages: int
    blocks_per_sm: int = 1
    k16_batch: int = 0
    cluster_n: int = 1

    @property
    def block_n(self) -> int:
        return WGMMA_M * self.warp_groups * self.col_tiles

    @property
    def sums(self) -> int:
        return self.col_tiles * self.block_m // 2

    @property
    def gives_registers(self) -> bool:
        return self.sums > MANY_SUMS

    @property
    def threads(self) -> int:
        """Threads of one block: the multiplying ones and one copying warp, or four if they leave registers."""
        return 128 * self.warp_groups + (128 if self.gives_registers else 32)

    def block_k(self, weights: Weights) -> int:
        """Return the elements of K in a stage."""
        return weights.block_k(self.line_bytes)

    def k16_batch_of(self, weights: Weights) -> int:
        """Return the K steps of 16 issued together: at most half a stage, since two batches alternate."""
        return self.k16_batch or max(1, min(self.block_k(weights) // 32, K16_BATCH // self.col_tiles))

    @property
    def room_bytes(self) -> int:
        """Maximum shared memory of a block."""
        return (SMEM_BYTES + SYSTEM_BYTES) // self.blocks_per_sm - SYSTEM_BYTES

    def received_bytes(self, cluster_k: int) -> int:
        """Return the bytes of sums that a block receives from the other blocks of its cluster."""
        return (cluster_k - 1) * self._finished_rows(cluster_k) * self.block_n * 4

    def receives_apart(self, weights: Weights, cluster_k: int) -> bool:
        """Return True if received sums have their own space, and do not reuse that of the stages."""
        apart = BARRIERS_BYTES + self._tile_bytes(weights, cluster_k) + self.received_bytes(cluster_k)
        return apart <= self.room_bytes

    def shared_bytes(self, weights: Weights, cluster_k: int = 1) -> int:
        """Return the shared memory of a block: barriers, stages or the finished sums that reuse them, and received sums."""
        received = self.received_bytes(cluster_k)
        if self.receives_apart(weights, cluster_k):
            return BARRIERS_BYTES + self._tile_bytes(weights, cluster_k) + received
        return BARRIERS_BYTES + max(self._stages_bytes(weights), self._finished_bytes(cluster_k) + received)

    def _finished_rows(self, cluster_k: int) -> int:
        """Return the tile rows that each block of the cluster finishes."""
        return 8 * -(-self.block_m // 8 // cluster_k)

    def _stages_bytes(self, weights: Weights) -> int:
        return self.stages * weights.stage_bytes(self.block_m, self.block_n, self.line_bytes)

    def _finished_bytes(self, cluster_k: int) -> int:
        return self._finished_rows(cluster_k) * (self.block_n + EXTRA_COLS) * 4

    def _tile_bytes(self, weights: Weights, cluster_k: int) -> int:
        return max(self._stages_bytes(weights), self._finished_bytes(cluster_k))

    def registers(self, weights: Weights) -> int:
        return BASE_REGISTERS + self.sums + 2 * self.col_tiles * len(weights.factors)

    @property
    def most_registers(self) -> int:
        return LEFT_REGISTERS if self.gives_registers else registers_per_thread(self.threads, self.blocks_per_sm)

    def label(self, weights: Weights) -> str:
        """Return a name such as ``256x128x64_s5_w2t1b2``: block_m, block_n, block_k, stages, warp groups, col_tiles, k16_batch."""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k(weights)}"
        more = f"_r{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        more += f"_1x{self.cluster_n}" if self.cluster_n > 1 else ""
        return f"{tile}_s{self.stages}_w{self.warp_groups}t{self.col_tiles}b{self.k16_batch_of(weights)}{more}"


SHAPES: dict[int, tuple[Shape, ...]] = {
    8: (
        Shape(block_m=16, warp_groups=1, col_tiles=1, line_bytes=128, stages=8, blocks_per_sm=2),
        Shape(block_m=32, warp_groups=1, col_tiles=1, line_bytes=128, stages=6, blocks_per_sm=2),
        Shape(block_m=64, warp_groups=1, col_tiles=1, line_bytes=128, stages=4, blocks_per_sm=2),
        Shape(block_m=64, warp_groups=2, col_tiles=1, line_bytes=128, stages=4, k16_batch=2),
        Shape(block_m=96, warp_groups=2, col_tiles=1, line_bytes=128, stages=5),
        Shape(block_m=128, warp_groups=2, col_tiles=1, line_bytes=128, stages=4),
        Shape(block_m=256, warp_groups=2, col_tiles=1, line_bytes=64, stages=4),
        Shape(block_m=192, warp_groups=2, col_tiles=1, line_bytes=128, stages=3, cluster_n=2),
    ),
    4: (
        Shape(block_m=16, warp_groups=1, col_tiles=1, line_bytes=128, stages=6, blocks_per_sm=2),
        Shape(block_m=32, warp_groups=1, col_tiles=1, line_bytes=128, stages=4, blocks_per_sm=2),
        Shape(block_m=64, warp_groups=2, col_tiles=1, line_bytes=128, stages=4, k16_batch=2),
        Shape(block_m=128, warp_groups=2, col_tiles=1, line_bytes=64, stages=4),
        Shape(block_m=128, warp_groups=2, col_tiles=2, line_bytes=64, stages=4),
        Shape(block_m=192, warp_groups=2, col_tiles=1, line_bytes=64, stages=3),
        Shape(block_m=256, warp_groups=2, col_tiles=1, line_bytes=64, stages=3),
        Shape(block_m=128, warp_groups=3, col_tiles=1, line_bytes=64, stages=4),
    ),
}
"""Shapes by the bits of a weight, from few rows to the largest tile that registers hold.

Those of 16 and 32 rows give few rows the bits of many: skinny kernels, which are faster there, sum K in another order. The
smallest shapes run two blocks on a multiprocessor. 192 rows by 128 bytes of a column are 56 KiB for each step: more than L2
delivers in the time of the products, unless two blocks share the rows. That raises the speed of an H100 by 1.05 to 1.28 up to 1024
rows. With the smaller 4-bit weights it raises nothing.

Three warp groups fill an H200 with tiles of 256 or 512 rows whose K two blocks divide: 0.92 of the time of the next best kernel,
but 0.99 with 8-bit weights.
"""
SHAPES_FOR_GROUPS = {
    8: (*SHAPES[8][:-1], Shape(block_m=144, warp_groups=2, col_tiles=1, line_bytes=128, stages=4)),
    4: (*SHAPES[4][:-2], Shape(block_m=144, warp_groups=2, col_tiles=1, line_bytes=64, stages=4)),
}
"""Shapes for grouped products, without the last ones for dense products: the largest tiles.

If groups have about 128 or 256 rows, half of them have a few more. One or two tiles of 144 rows hold those too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MixedConfig):
    """Shape of this kernel plus launch parameters."""

    shape: Shape

    @property
    def cluster(self) -> int:
        """Blocks of a cluster: those that divide K, or those with tiles side by side."""
        return self.cluster_k * self.shape.cluster_n
