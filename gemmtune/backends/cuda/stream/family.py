"""Family of persistent kernels for dense products: supported problems, time model, source and launches."""

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Problem
from ....problem.rules import why_not_dense
from ....toolchain.record import WORKSPACE, Address, Record
from .. import grouped, kernel, wgmma_stream
from ..boxes import by_k, operands_of, staged_maps, why_not_boxes
from ..family import Family, beginnings, float32_sums, why_not_epilogue, why_not_here
from ..groups import strip_of_rows, why_not_placed
from ..hopper import TMA_BYTES, WGMMA, clusters_at_a_time
from ..kernel import KernelSource
from .configs import BLOCK_K, REGISTERS, SHAPES, Config, Division, Shape, lines_of, tiles_of, why_not_config

FLAGS_BYTES = 2**14
"""Size of all flags: 4 bytes for each warp of MOST_BLOCKS blocks."""
TILE_US = 1.6
"""Overhead of each tile of a block. All constants of the model are fitted to 2,061 times on an H100."""
FLOPS_PER_NS = 5230.0
"""Throughput of one multiprocessor for 16-bit products."""
SHARED_GBPS = 198.0
"""Bandwidth of a multiprocessor's shared memory. Copies write operands, and each warp group reads its lines of p and all of q."""
L2_GBPS, DRAM_GBPS = 8900.0, 2735.0
"""Bandwidth from L2 to all multiprocessors, multicast data counted once, and of memory."""
LEAST_STEP_NS = 200.0
"""Barrier overhead of one pipeline step."""
EXCHANGE_GBPS, EXCHANGE_US = 32.0, 2.3
"""Rate at which a block stores its sums or adds those of another block, and the delay until the other sees them."""
APART = 1.1
"""Slowdown if clusters with the same columns of b are not one: they read them from L2 one after another."""
OVERLAP = 6
"""Exponent of the norm that adds the times of multiplying and of reading memory. They overlap, and slow each other if equal."""
WAIT_US = 2.5
"""Time from a block's last product until another block sees its sums."""
LEAST_ROWS, MOST_ROWS = 97, 1536
"""Rows of a between which a search tries the kernel. With fewer, other families are faster, and with more torch is as fast."""
LEAST_BYTES = 2**23
"""Minimum size of b that a search tries. Smaller products were not measured."""
LEAST_ROWS_OF_LARGE, LARGE_BYTES = 32, 2**26
"""Rows of a from which a search tries the kernel if b has LARGE_BYTES."""


class Work(kernel.Work):
    """Parameters of the persistent kernel.

    A tile has ``lines`` rows of the result, which may be fewer than the kernel has room for. There are ``tiles_m`` by
    ``tiles_n`` clusters of tiles, in strips of ``strip`` rows of clusters, with ``steps`` of K each. ``parts`` clusters share each
    of the first ``shared``. All but the last, the owner, sum ``each`` steps.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("sums", ctypes.c_void_p), ("flags", ctypes.c_void_p), ("rows", ctypes.c_int), ("cols", ctypes.c_int),
        ("lines", ctypes.c_int), ("tiles_m", ctypes.c_int), ("tiles_n", ctypes.c_int), ("strip", ctypes.c_int),
        ("steps", ctypes.c_int), ("shared", ctypes.c_int), ("parts", ctypes.c_int), ("each", ctypes.c_int),
        ("prefetch_stages", ctypes.c_int), ("vectors", ctypes.c_bool),
    )  # fmt: skip


SUMS_AND_FLAGS = (
    Address(offset=Work.flags.offset, operand=WORKSPACE),
    Address(offset=Work.sums.offset, operand=WORKSPACE, more_bytes=FLAGS_BYTES),
)
"""Workspace addresses. Launches for any M share a workspace, and only flags are clear after a launch: they have their own place."""


class Stream(Family[Config]):
    """Family of ``stream.cu.jinja``. ``configs.py`` has the legality."""

    name = "stream"
    package = __package__
    likely = 1.15
    instruction = WGMMA
    why_not_config = staticmethod(why_not_config)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        reason = why_not_dense(problem) or why_not_here(problem, device) or why_not_boxes(problem) or why_not_epilogue(problem)
        return (
            reason
            or why_not_placed(problem)
            or (f"a batch of {problem.batch} products, expected one" if problem.batch > 1 else None)
        )

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - device-independent
        if search == "exhaustive":
            return None
        m, b_bytes = problem.m, problem.n * problem.k * problem.b.dtype.itemsize
        least = LEAST_ROWS_OF_LARGE if b_bytes >= LARGE_BYTES else LEAST_ROWS
        if not least <= m <= MOST_ROWS:
            return f"a has {m} rows, tried from {least} to {MOST_ROWS}"
        return f"b has {b_bytes} bytes, tried from {LEAST_BYTES} on" if b_bytes < LEAST_BYTES else None

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        shape, division = config.shape, Division.of(problem, config)
        at_a_time = min(division.clusters, clusters_at_a_time(device.sm_count, shape.cluster))
        waves, slow = division.waves + (1 / division.parts if division.shared else 0), -(-division.clusters // at_a_time)
        steps_us = slow * waves * division.steps * step_us_of(problem, config, at_a_time * shape.cluster)
        tiles_us = (division.waves + (division.shared > 0)) * TILE_US
        exchange_us = (division.parts - 1) * shape.sums_bytes / EXCHANGE_GBPS / 1e3 + EXCHANGE_US * (division.shared > 0)
        reading_us = problem.bytes / DRAM_GBPS / 1e3
        return float(((steps_us + tiles_us) ** OVERLAP + reading_us**OVERLAP) ** (1 / OVERLAP)) + exchange_us

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Return every shape with and without ``swap_ab``, with shared tiles if sums load fast and with whole tiles, best first."""
        found = [
            Config(
                shape=shape, blocks=blocks_of(shape, device), swap_ab=swap_ab, whole=whole, pdl=True, prefetch_stages=shape.stages
            )
            for shape in SHAPES
            for swap_ab in ((False,) if shape.cluster_m > 1 else (False, True))
            for whole in ((False, True) if shape.loads > 1 else (True,))
        ]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), not config.whole, str(config)))

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - config decides
        yield from beginnings(config, config.shape.stages)
        yield dataclasses.replace(config, whole=not config.whole)

    def claims(self, problem: Problem, config: Config) -> Claims:
        return float32_sums(splits=Division.of(problem, config).parts)

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return one run over K, or None if tiles are shared: then the place of a tile decides how."""
        return reduction_of(problem, "cuda") if config.whole else None

    def batch_invariant(self, problem: Problem, config: Config) -> bool:  # noqa: ARG002 - the config decides
        """Return False if tiles are shared: their number and order decide where."""
        return config.whole

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:
        tile, splits = (config.shape.block_m, config.shape.block_n, BLOCK_K), Division.of(problem, config).parts
        return self.facts(config, tile, cluster=config.shape.cluster, splits=splits)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        shape = config.shape
        p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
        given, left = REGISTERS[shape.warp_groups] or (None, None)
        values = {
            "swap_ab": config.swap_ab,
            "p_by_k": bool(by_k(p)),
            "q_by_k": bool(by_k(q)),
            "block_k": BLOCK_K,
            "given_registers": given,
            "left_registers": left,
            "terms": False,
            "fitted": 0,
        }
        return self.made(
            files=(
                *kernel.STAGED_PRODUCTS,
                *kernel.files_of(wgmma_stream.__name__, "flags"),
                *kernel.files_of(__package__, "steps", "exchange"),
                *kernel.files_of(grouped.__name__, "results"),
            ),
            values=kernel.common_values(problem, Work, {"sums": "float4*", "flags": "unsigned*"})
            | kernel.values_of(shape, "multiplying", "stages", "stored_bytes", "loads", "ragged")
            | values,
        )

    def record(self, problem: Problem, config: Config) -> Record:
        """Return the launch record. The workspace has the flags of warps, then the sums that each block leaves."""
        shape, division = config.shape, Division.of(problem, config)
        extra = operands_of(problem, swap_ab=False)[2].added
        work = kernel.work_of(Work, problem.out, extra)
        work.rows, work.cols, work.lines = problem.m, problem.n, lines_of(problem, config)
        work.tiles_m, work.tiles_n = tiles_of(problem, config)
        work.strip, work.steps = strip_of_rows(config.tile[0]), division.steps
        work.shared, work.parts = division.shared, division.parts
        work.each = division.each(lead_us(division) / step_us_of(problem, config, division.clusters * shape.cluster))
        work.prefetch_stages = config.prefetch_stages
        work.vectors, aligned = kernel.aligned_out(Work.vectors, problem.out, TMA_BYTES // problem.out.dtype.itemsize)
        blocks = shape.cluster * division.clusters
        lines = (shape.block_m, work.lines) if config.swap_ab else (work.lines, shape.block_n)
        return self.launch(
            problem,
            config,
            work,
            staged_maps(problem, config, lines, BLOCK_K),
            grid=(blocks, 1, 1),
            cluster=shape.cluster,
            addresses=SUMS_AND_FLAGS if division.shared else (),
            aligned=aligned,
            workspace_bytes=FLAGS_BYTES + blocks * shape.sums_bytes if division.shared else 0,
        )


def blocks_of(shape: Shape, device: DeviceInfo) -> int:
    """Return the blocks of all clusters that run at once."""
    return shape.cluster * clusters_at_a_time(device.sm_count, shape.cluster)


def step_us_of(problem: Problem, config: Config, blocks: int) -> float:
    """Return the time of one step of a tile while ``blocks`` multiprocessors multiply."""
    shape, lines = config.shape, lines_of(problem, config)
    lines_p, lines_q = (shape.block_m, lines) if config.swap_ab else (lines, shape.block_n)
    multiplying_ns = 2 * shape.block_m * shape.block_n * BLOCK_K / FLOPS_PER_NS
    moved = 2 * BLOCK_K * (lines_p + lines_q + shape.block_m + shape.warp_groups * shape.block_n)
    copied = 2 * BLOCK_K * (lines_p / shape.cluster_n + lines_q / shape.cluster_m)
    along_m = shape.cluster_n if config.swap_ab else shape.cluster_m
    apart = APART if along_m == 1 and problem.m > config.tile[0] else 1.0
    return apart * max(multiplying_ns, moved / SHARED_GBPS, copied * blocks / L2_GBPS, LEAST_STEP_NS) / 1e3


def lead_us(division: Division) -> float:
    """Return how much longer an owner multiplies than the others, whose sums it would wait for without whole tiles before."""
    return 0.0 if division.waves else WAIT_US
