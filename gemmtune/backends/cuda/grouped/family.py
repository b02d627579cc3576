"""Family of kernels for grouped products: supported problems, source and launches."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Problem
from ....problem.rules import why_not
from ....toolchain.record import A, B, Record, with_maps
from ....toolchain.structs import strides_of
from .. import kernel
from ..boxes import by_k, operands_of, staged_map, why_not_boxes
from ..family import Family, float32_sums, why_not_epilogue, why_not_here
from ..groups import why_not_placed
from ..hopper import GIVEN_REGISTERS, LEFT_REGISTERS, TMA_BYTES, WGMMA
from ..kernel import KernelSource
from .configs import (
    BLOCK_K,
    STORED_BYTES,
    THREADS,
    Config,
    clusters_along_n,
    most_clusters,
    why_not_config,
    why_not_groups,
)
from .rank import candidates, estimate_us, strip_of

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
    """Family of ``grouped.cu.jinja``. ``rank.py`` has the ranking, ``configs.py`` the legality."""

    name = "grouped"
    likely = 1.5
    instruction = WGMMA
    why_not_config = staticmethod(why_not_config)
    candidates = staticmethod(candidates)
    estimate_us = staticmethod(estimate_us)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        reason = why_not(problem, OPERATIONS) or why_not_here(problem, device) or why_not_boxes(problem) or why_not_placed(problem)
        return reason or why_not_groups(problem) or why_not_epilogue(problem)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002
        """Yield configs with PDL switched, and with other tile orders."""
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
        return KernelSource(
            kernel=self.kernel,
            unit=(__package__, "grouped.cu.jinja"),
            files=(*kernel.STAGED_PRODUCTS, kernel.TILES, *kernel.files_of(__package__, "device", "steps", "results")),
            values=kernel.common_values(problem, Work)
            | kernel.values_of(config.shape, "gives_registers", "products_n")
            | {
                "block_k": BLOCK_K,
                "multiplying": THREADS,
                "terms": problem.divides_terms,
                "swap_ab": config.swap_ab,
                "stored_bytes": STORED_BYTES,
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
        work = Work()
        kernel.fill_common(work, problem.out, (problem.offs, *extra))
        work.rows, work.cols, work.terms, work.groups = problem.m, problem.n, problem.k, problem.groups
        work.tiles_n, work.strip, work.steps = clusters_along_n(problem, config), config.strip, -(-problem.k // BLOCK_K)
        work.b_batched = not problem.divides_terms and bool(strides_of(problem.b).batch)
        work.vectors, aligned = kernel.aligned_out(Work.vectors, problem.out, TMA_BYTES // problem.out.dtype.itemsize)
        clusters = min(config.blocks // shape.cluster, most_clusters(problem, config))
        launch = self.launch(
            config,
            work,
            grid=(shape.cluster * clusters, 1, 1),
            cluster=shape.cluster,
            addresses=kernel.addresses_of(1 + len(extra)),
            aligned=aligned,
            alignment=((A, TMA_BYTES), (B, TMA_BYTES)),
        )
        first, second = (B, A) if config.swap_ab else (A, B)
        if shape.fitted:
            return with_maps(launch, (staged_map(p, first, shape.block_m, BLOCK_K), staged_map(q, second, shape.fitted, BLOCK_K)))
        first_map = staged_map(p, first, shape.block_m, BLOCK_K, shape.cluster_n)
        return with_maps(launch, (first_map, staged_map(q, second, shape.block_n, BLOCK_K, shape.cluster_m)))
