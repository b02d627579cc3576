"""Family of kernels for grouped products: supported problems, time model, source and launches."""

import ctypes
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Problem
from ....problem.rules import why_not
from ....toolchain.record import A, B, Record
from ....toolchain.structs import strides_of
from .. import kernel
from ..boxes import by_k, operands_of, staged_map, staged_maps, why_not_boxes
from ..family import Family, float32_sums, why_not_epilogue, why_not_here
from ..groups import strip_of_rows, why_not_placed
from ..hopper import GIVEN_REGISTERS, LEFT_REGISTERS, TMA_BYTES, WGMMA, clusters_at_a_time
from ..kernel import KernelSource
from . import configs
from .configs import BLOCK_K, FITTED, SHAPES, Config, Shape, clusters_along_n, most_clusters, why_not_config, why_not_groups

LAUNCH_US = 3.0
DRAM_GBPS = 4300.0
L2_GBPS = 8000.0
"""Bandwidth from L2 to all multiprocessors. Multicast data counts once."""
FLOPS_PER_NS = 6000.0
"""Throughput of one multiprocessor for 16-bit products."""
LEAST_STEP_NS = 60.0
"""Barrier overhead of one pipeline step."""
TILE_US = 0.7
"""Overhead of a tile in addition to its steps: the first products and the stores, while tensor cores idle."""
LEAST_FITTED_ROWS = 32
"""Minimum mean rows of a group for fitted tiles. Smaller groups have one tile, with nothing to divide."""
STORED_GBPS = 40.0
"""Rate at which a block stores its results."""


def _memory_us(problem: Problem, groups: float) -> float:
    weights = groups * problem.n * problem.k if not problem.divides_terms else problem.n * problem.k
    elements = problem.m * problem.k + weights + problem.out.numel
    return elements * problem.dtype.itemsize / DRAM_GBPS / 1e3


def _config(shape: Shape, device: DeviceInfo, *, swap_ab: bool) -> Config:
    config = Config(shape=shape, swap_ab=swap_ab, blocks=max(device.sm_count, shape.cluster), pdl=True)
    return dataclasses.replace(config, strip=strip_of(config))


def strip_of(config: Config) -> int:
    return strip_of_rows(config.tile[0] * config.shape.cluster_m)


OPERATIONS = ("grouped_mm", "grouped_k_mm")


class Work(kernel.Work):
    """Parameters of the grouped kernel.

    ``rows`` and ``cols`` are those of the result, or of each group's result if groups divide ``terms``. ``tiles_n`` counts clusters
    of tiles along N.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("terms", ctypes.c_int), ("groups", ctypes.c_int),
        ("tiles_n", ctypes.c_int), ("strip", ctypes.c_int), ("steps", ctypes.c_int), ("b_batched", ctypes.c_bool),
        ("vectors", ctypes.c_bool),
    )  # fmt: skip


class Grouped(Family[Config]):
    """Family of ``grouped.cu.jinja``. ``configs.py`` has the legality."""

    name = "grouped"
    package = __package__
    likely = 1.5
    instruction = WGMMA
    why_not_config = staticmethod(why_not_config)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        reason = why_not(problem, OPERATIONS) or why_not_here(problem, device) or why_not_boxes(problem) or why_not_placed(problem)
        return reason or why_not_groups(problem) or why_not_epilogue(problem)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        """Return every shape with and without ``swap_ab``, best first. Fitted ones need ``swap_ab`` and groups with enough rows."""
        found = [_config(shape, device, swap_ab=swap_ab) for shape in SHAPES if not shape.fitted for swap_ab in (False, True)]
        if not problem.divides_terms and problem.m > LEAST_FITTED_ROWS * problem.groups:
            found += [_config(shape, device, swap_ab=True) for shape in FITTED]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), config.swap_ab, str(config)))

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        shape, rows = config.shape, config.tile[0] * config.shape.cluster_m
        lines_q = float(shape.block_n)
        if problem.divides_terms:
            groups, k, below = float(problem.groups), problem.k / problem.groups, float(-(-problem.m // rows))
        else:
            groups, k = max(1.0, problem.groups * -math.expm1(-problem.m / problem.groups)), float(problem.k)  # nonempty groups
            share = problem.m / groups
            below = max(1.0, share / rows + 0.5)
            if shape.fitted:
                lines_q = min(shape.block_n, (share + shape.fitted / 2) / below)
        steps = math.ceil(k / BLOCK_K)
        clusters = groups * below * clusters_along_n(problem, config)
        at_a_time = clusters_at_a_time(min(config.blocks, device.sm_count), shape.cluster)
        waves = math.ceil(clusters / at_a_time) if clusters < 2 * at_a_time else clusters / at_a_time + 0.5
        multiplying_ns = 2 * shape.block_m * lines_q * BLOCK_K / FLOPS_PER_NS
        shared_p, shared_q = (shape.cluster_m, shape.cluster_n) if config.swap_ab else (shape.cluster_n, shape.cluster_m)
        copied = 2 * BLOCK_K * (shape.block_m / shared_p + lines_q / shared_q)
        copying_ns = copied * device.sm_count / L2_GBPS
        step_ns = max(multiplying_ns, copying_ns, LEAST_STEP_NS)
        tile_us = TILE_US + shape.block_m * lines_q * problem.out.dtype.itemsize / STORED_GBPS / 1e3 + steps * step_ns / 1e3
        return LAUNCH_US + max(waves * tile_us, _memory_us(problem, groups)) + 0.01 * waves * tile_us

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002
        yield dataclasses.replace(config, pdl=not config.pdl)
        strip = strip_of(config)
        for other in (strip, max(1, strip // 2), 2 * strip):
            if other != config.strip:
                yield dataclasses.replace(config, strip=other)

    def label(self, problem: Problem, config: Config) -> str:
        return f"{'k_' if problem.divides_terms else ''}{config}"

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all configs
        return float32_sums()

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:  # noqa: ARG002 - the same for all configs
        """Return one run over K, whatever rows a group has. None: groups divide the terms."""
        return None if problem.divides_terms else reduction_of(problem, "cuda")

    def batch_invariant(self, problem: Problem, config: Config) -> bool:  # noqa: ARG002 - the problem decides
        """Return False if groups divide the terms, whose number is data."""
        return not problem.divides_terms

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the same for all problems
        return self.facts(config, (config.shape.block_m, config.shape.block_n, BLOCK_K), cluster=config.shape.cluster)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
        return self.made(
            files=(*kernel.STAGED_PRODUCTS, kernel.TILES, *kernel.files_of(__package__, "device", "steps", "results")),
            values=kernel.common_values(problem, Work)
            | kernel.values_of(config.shape, "gives_registers", "products_n")
            | {
                "block_k": BLOCK_K,
                "multiplying": configs.THREADS,
                "terms": problem.divides_terms,
                "swap_ab": config.swap_ab,
                "stored_bytes": configs.STORED_BYTES,
                "given_registers": GIVEN_REGISTERS,
                "left_registers": LEFT_REGISTERS,
                "p_by_k": bool(by_k(p)),
                "q_by_k": bool(by_k(q)),
            },
        )

    def record(self, problem: Problem, config: Config) -> Record:
        shape, (p, q, _) = config.shape, operands_of(problem, swap_ab=config.swap_ab)
        assert problem.offs is not None
        extra = operands_of(problem, swap_ab=False)[2].added
        work = kernel.work_of(Work, problem.out, (problem.offs, *extra))
        work.rows, work.cols, work.terms, work.groups = problem.m, problem.n, problem.k, problem.groups
        work.tiles_n, work.strip, work.steps = clusters_along_n(problem, config), config.strip, -(-problem.k // BLOCK_K)
        work.b_batched = not problem.divides_terms and bool(strides_of(problem.b).batch)
        work.vectors, aligned = kernel.aligned_out(Work.vectors, problem.out, TMA_BYTES // problem.out.dtype.itemsize)
        clusters = min(config.blocks // shape.cluster, most_clusters(problem, config))
        maps = staged_maps(problem, config, (shape.block_m, shape.block_n), BLOCK_K)
        if shape.fitted:
            maps = staged_map(p, B, shape.block_m, BLOCK_K), staged_map(q, A, shape.fitted, BLOCK_K)
        return self.launch(
            problem,
            config,
            work,
            maps,
            grid=(shape.cluster * clusters, 1, 1),
            cluster=shape.cluster,
            aligned=aligned,
        )
