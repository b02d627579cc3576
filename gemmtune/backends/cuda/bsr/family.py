"""Family of kernels for block-sparse weights with small blocks: supported problems, time model, source and launches."""

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ....toolchain.orientation import orient
from ....toolchain.record import A, Address, B, Record
from .. import kernel
from ..boxes import LINE, by_k, staged_map, why_not_box
from ..family import Family
from ..groups import why_not_placed
from ..hopper import MMA, clusters_at_a_time
from ..kernel import KernelSource
from .configs import FRAGMENT, GIVEN_REGISTERS, SHAPES, Config, groups_of, tiles_of, units_of, why_not_config
from .packing import block_of, claims_of_blocks, format_of, fragments_at, packed, why_not_weight, words_of

LAUNCH_US, TILE_US = 3.5, 1.5
"""Minimum time of a launch, and the time of a tile's beginning and end."""
DRAM_GBPS, SM_GBPS, SHARED_GBPS = 3800.0, 60.0, 220.0
"""Bandwidths of memory, of L2 to one multiprocessor (x counts once per cluster), and of its shared memory."""
FLOPS_PER_NS = 2650.0
"""Throughput of one multiprocessor with warp products (mma)."""
STEP_NS, LATENCY_NS = 4.0, 500.0
"""Scheduler time of a step without blocks in one warp, and the latency of loading a fragment."""


DENSEST = 0.4
"""Highest density tried by default. Above it, panels of warp-group products or the dense product should be as fast."""
TRANSPOSED_ELEMENTS = 4
"""Elements of one store into a 16-bit result with contiguous weight rows."""


class Work(kernel.Work):
    """Parameters of the kernel, which computes w [rows, K] times the transpose of x [cols, K]."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("packed", ctypes.c_void_p), ("fragments_at", ctypes.c_longlong), ("rows", ctypes.c_int), ("cols", ctypes.c_int),
        ("units", ctypes.c_int), ("words", ctypes.c_int), ("steps", ctypes.c_int), ("groups", ctypes.c_int),
        ("tiles", ctypes.c_int), ("paired", ctypes.c_bool),
    )  # fmt: skip


class Bsr(Family[Config]):
    """Family of ``bsr.cu.jinja``. ``configs.py`` has the legality."""

    name = "bsr"
    package = __package__
    likely = 1.5
    instruction = MMA
    legal_between = True
    why_not_config = staticmethod(why_not_config)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        return why_not_weight(problem, device) or why_not_placed(problem) or why_not_box("x", problem.a)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        found = [Config(shape=shape, blocks=max(device.sm_count, shape.cluster), pdl=True) for shape in SHAPES]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), str(config)))

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        """Return the model's time of a launch, in microseconds: the bottleneck of one tile, times the waves of tiles."""
        shape, sparsity = config.shape, problem.blocks
        density, block = max(sparsity.density, 0.005), sparsity.block_k
        x_bytes = 2.0 * problem.k * shape.block_n
        weight_bytes = 2.0 * density * problem.k * shape.rows
        fragments = weight_bytes / (2 * FRAGMENT**2)
        tile_ns = max(
            (x_bytes / shape.cluster + weight_bytes) / SM_GBPS,
            (x_bytes + fragments * 2 * FRAGMENT * shape.block_n * FRAGMENT / block) / SHARED_GBPS,
            weight_bytes * shape.block_n / FLOPS_PER_NS,
            fragments / shape.warps / shape.queue * LATENCY_NS,
            problem.k / LINE * shape.warps * STEP_NS,
        )
        rounds = -(-tiles_of(problem, shape) // clusters_at_a_time(device.sm_count, shape.cluster))
        moved = 2 * (density * problem.n + problem.m) * problem.k + problem.out.dtype.itemsize * problem.m * problem.n
        return LAUNCH_US + max(rounds * (TILE_US + tile_ns / 1e3), moved / DRAM_GBPS / 1e3)

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - device-independent
        if problem.blocks.density <= DENSEST or search == "exhaustive":
            return None
        return f"density is {problem.blocks.density}, at most {DENSEST} is tried: set search to exhaustive to try more"

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:
        yield dataclasses.replace(config, pdl=not config.pdl)
        for blocks in (device.sm_count, tiles_of(problem, config.shape) * config.shape.cluster):
            if blocks != config.blocks and tiles_of(problem, config.shape) * config.shape.cluster > device.sm_count:
                yield dataclasses.replace(config, blocks=blocks)

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all configs
        return claims_of_blocks()

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the same for all problems
        return self.facts(config, (config.shape.rows, config.shape.block_n, LINE), cluster=config.shape.cluster)

    def packed_format(self, problem: Problem, config: Config) -> str | None:  # noqa: ARG002 - one for all configs
        return format_of(block_of(problem))

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return packed(b)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        return self.made(
            files=(*kernel.STAGED_PRODUCTS, *kernel.STORE, *kernel.files_of(__package__, "device", "steps", "results")),
            values=kernel.common_values(problem, Work, {"packed": "unsigned char const*"})
            | kernel.values_of(config.shape, "gives_registers", "left_registers")
            | {
                "products_n": [],
                "block": block_of(problem),
                "given_registers": GIVEN_REGISTERS,
                "x_by_k": bool(by_k(problem.a)),
                "transposed": stores_transposed(problem),
            },
        )

    def record(self, problem: Problem, config: Config) -> Record:
        shape, oriented, block = config.shape, orient(problem, swap_ab=True), block_of(problem)
        work = kernel.work_of(Work, oriented.out, oriented.added)
        work.rows, work.cols, work.steps = problem.n, problem.m, -(-problem.k // LINE)
        work.units, work.words = units_of(problem.n), words_of(problem.k, block)
        work.fragments_at = fragments_at(problem.n, problem.k, block)
        work.groups, work.tiles = groups_of(problem, shape), tiles_of(problem, shape)
        stored = (problem.out, TRANSPOSED_ELEMENTS) if stores_transposed(problem) else (oriented.out, 2)
        work.paired, aligned = kernel.aligned_out(Work.paired, *stored)
        return self.launch(
            problem,
            config,
            work,
            (staged_map(problem.a, A, shape.block_n, LINE, shape.cluster),),
            grid=(shape.cluster * min(config.blocks // shape.cluster, work.tiles), 1, 1),
            cluster=shape.cluster,
            addresses=(Address(offset=Work.packed.offset, operand=B),),
            aligned=aligned,
        )


def stores_transposed(problem: Problem) -> bool:
    """Return True if 16-bit results are stored along the weight's rows, because these are contiguous in the result."""
    return problem.out.stride[-1] == 1 and problem.out.dtype.itemsize == 2
