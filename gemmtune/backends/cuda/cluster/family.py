"""Family of kernels for small results with long K: supported problems, source and launches."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, even_parts, reduction_of
from ....problem import Problem
from ....problem.rules import why_not_dense
from ....toolchain.record import WORKSPACE, Address, Record
from ....toolchain.structs import strides_of
from .. import kernel
from ..boxes import by_k, grid_of, operands_of, staged_maps, why_not_boxes
from ..family import Family, beginnings, float32_sums, why_not_epilogue, why_not_here
from ..hopper import WGMMA
from ..kernel import KernelSource
from .configs import Config, clusters_of, why_not_config
from .rank import candidates, cluster_counts, estimate_us, is_likely, why_not_likely

PATIENCE = 40
"""Number of polls for other clusters' sums, after which a warp leaves its work to the last cluster."""
ALIGNED_BYTES = 128


class Work(kernel.Work):
    """Parameters of the kernel, which computes p [rows, K] times the transpose of q [cols, K]."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("parts", ctypes.c_void_p), ("arrivals", ctypes.c_void_p), ("left", ctypes.c_void_p),
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("clusters_n", ctypes.c_int), ("steps", ctypes.c_int),
        ("clusters_per_tile", ctypes.c_int), ("prefetch_stages", ctypes.c_int), ("readers_log2", ctypes.c_int),
        ("share", ctypes.c_int), ("p_batched", ctypes.c_bool), ("q_batched", ctypes.c_bool), ("paired", ctypes.c_bool),
        ("interleaved_k", ctypes.c_bool),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Workspace of clusters that share tiles, zero between launches: counters of slices, marks of warps that left, partial sums."""

    slices: int
    slice_quads: int
    clusters: int
    warps: int

    @classmethod
    def of(cls, problem: Problem, config: Config) -> Sums:
        shape = config.shape
        return cls(
            slices=clusters_of(problem, config) * shape.cluster,
            slice_quads=shape.block_n // 8 // shape.cluster_k * 128 * shape.warp_groups,
            clusters=config.clusters_per_tile,
            warps=4 * shape.warp_groups,
        )

    @property
    def left_at(self) -> int:
        """Byte offset of the marks."""
        return 8 * self.slices

    @property
    def parts_at(self) -> int:
        """Byte offset of the partial sums."""
        return -(-self.slices * (8 + 4 * self.clusters * self.warps) // ALIGNED_BYTES) * ALIGNED_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of the workspace. It is 0 if a tile has a single cluster."""
        return self.parts_at + self.slices * self.clusters * self.slice_quads * 16 if self.clusters > 1 else 0

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Offsets in Work of the workspace addresses."""
        places = ((Work.arrivals, 0), (Work.left, self.left_at), (Work.parts, self.parts_at))
        return tuple(Address(offset=field.offset, operand=WORKSPACE, more_bytes=more) for field, more in places if self.size_bytes)


class Cluster(Family[Config]):
    """Family of ``cluster.cu.jinja``. ``rank.py`` has the ranking, ``configs.py`` the legality."""

    name = "cluster"
    package = __package__
    legal_between = True
    likely = 1.2
    instruction = WGMMA
    why_not_likely = staticmethod(why_not_likely)
    why_not_config = staticmethod(why_not_config)
    candidates = staticmethod(candidates)
    estimate_us = staticmethod(estimate_us)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        return why_not_dense(problem) or why_not_here(problem, device) or why_not_boxes(problem) or why_not_epilogue(problem)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:
        yield from beginnings(config, config.shape.prefetch_stages)
        for count in cluster_counts(config.shape, clusters_of(problem, config), problem, device):
            if count != config.clusters_per_tile:
                yield dataclasses.replace(config, clusters_per_tile=count)

    def likeliest(self, problem: Problem, device: DeviceInfo, ordered: Sequence[Config], count: int | None) -> list[Config]:
        """Return the likely configs. Only an exhaustive search, and batch invariance, try those with one run of K."""
        return super().likeliest(problem, device, [x for x in ordered if count is None or is_likely(problem, device, x)], count)

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all problems
        return float32_sums(splits=config.parts)

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return the parts of K, and the order in which blocks and clusters add them."""
        if not self.batch_invariant(problem, config):
            return None
        shape, order = config.shape, ""
        if shape.cluster_k > 2:  # each block adds its own sums first, and finishes some columns
            order = f"rotated every {shape.block_n // shape.cluster_k} columns"
        if config.clusters_per_tile > 1:
            readers = readers_of(config)
            order = ", ".join(x for x in (order, f"{config.clusters_per_tile} clusters by {readers} readers") if x)
        order += f", interleaved by {shape.block_k}" if config.interleaved_k else ""
        parts = even_parts(problem.k, shape.block_k, config.parts)
        return reduction_of(problem, "cuda", parts=parts, order=order, own="cuda clusters" if order else "")

    def batch_invariant(self, problem: Problem, config: Config) -> bool:  # noqa: ARG002 - the config decides
        """Return False if rows of a are the columns that blocks finish, each beginning with its own sums. Two sums commute."""
        return not (config.swap_ab and config.shape.cluster_k > 2)

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the same for all problems
        shape = config.shape
        return self.facts(config, (shape.block_m, shape.block_n, shape.block_k), cluster=shape.cluster, splits=config.parts)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
        pointers = {"parts": "uint4*", "arrivals": "unsigned long long*", "left": "unsigned*"}
        return self.made(
            files=(
                *kernel.STAGED_PRODUCTS,
                *kernel.files_of(__package__, "device", "steps"),
                *kernel.TILE_SUMS,
                *kernel.files_of(__package__, "groups"),
            ),
            values=kernel.common_values(problem, Work, pointers)
            | kernel.values_of(config.shape, "blocks_per_sm", "in_flight")
            | {"p_by_k": bool(by_k(p)), "q_by_k": bool(by_k(q)), "patience": PATIENCE},
        )

    def record(self, problem: Problem, config: Config) -> Record:
        shape, (p, q, oriented), sums = config.shape, operands_of(problem, swap_ab=config.swap_ab), Sums.of(problem, config)
        tiles_m, tiles_n = grid_of(problem, config)
        clusters_m, clusters_n = -(-tiles_m // shape.cluster_m), -(-tiles_n // shape.cluster_n)
        work = kernel.work_of(Work, oriented.out, oriented.added)
        work.rows, work.cols, work.clusters_n = p.size[-2], q.size[-2], clusters_n
        work.steps, work.prefetch_stages = -(-problem.k // shape.block_k), config.prefetch_stages
        work.clusters_per_tile, work.interleaved_k = sums.clusters, config.interleaved_k
        # readers_log2: threads that add up the parts of one quad. share: quads of a slice that each cluster finishes.
        work.readers_log2 = readers_of(config).bit_length() - 1
        work.share = -(-sums.slice_quads // sums.clusters)
        work.p_batched, work.q_batched = bool(strides_of(p).batch), bool(strides_of(q).batch)
        work.paired, aligned = kernel.aligned_out(Work.paired, oriented.out, 2)
        return self.launch(
            problem,
            config,
            work,
            staged_maps(problem, config, (shape.block_m, shape.block_n), shape.block_k),
            grid=(shape.cluster * sums.clusters, clusters_m, clusters_n * problem.batch),
            cluster=shape.cluster,
            addresses=sums.addresses,
            aligned=aligned,
            workspace_bytes=sums.size_bytes,
        )


def readers_of(config: Config) -> int:
    """Return the number of threads that add up the clusters' parts of one quad, a power of two."""
    return 1 << (-(-config.clusters_per_tile // config.shape.in_flight) - 1).bit_length()
