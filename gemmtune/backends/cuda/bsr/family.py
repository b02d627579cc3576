"""The family of kernels for block-sparse weights: what it serves, what is compiled, and what its launches are told."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....problem import Problem
from ....toolchain.orientation import orient
from ....toolchain.record import A, Address, B, Record, Swizzle, TensorMap, with_maps
from .. import kernel
from ..boxes import by_k
from ..family import Family, float32_sums, why_not_epilogue, why_not_here
from ..hopper import LINE_BYTES, TMA_BYTES, WGMMA
from ..kernel import PRODUCTS, TILE_SUMS, KernelSource, addresses_of, aligned_out, common_values, fill_common, scalars_of
from .configs import (
    MOST_JOINED,
    MOST_PROMOTED,
    MOST_TILES,
    UNIT,
    Config,
    Shape,
    groups_of,
    joins,
    room_of,
    tiles_n_of,
    tiles_of,
    why_not_config,
)  # fmt: skip
from .packing import PLACE_BITS, columns_of, format_of, packed_units, units_at
from .rank import candidates, estimate_us

TURNED = 4
"""Neighbours that a lane stores at once of a result of 16 bits whose columns are contiguous."""


class Work(kernel.Work):
    """Sizes are those of the product as the kernel sees it, w [rows, K] times x [cols, K] transposed."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("packed", ctypes.c_void_p), ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("groups", ctypes.c_int),
        ("columns", ctypes.c_int), ("tiles_n", ctypes.c_int), ("strip", ctypes.c_int), ("tiles", ctypes.c_int),
        ("paired", ctypes.c_bool),
    )  # fmt: skip


class Bsr(Family[Config]):
    """The family of ``bsr.cu.jinja``; its ranking is in ``rank.py``, its legality in ``configs.py``."""

    name = "bsr"
    kernel = "gemmtune_bsr"
    likely = 1.5
    instruction = WGMMA
    why_not_config = staticmethod(why_not_config)
    candidates = staticmethod(candidates)
    estimate_us = staticmethod(estimate_us)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        sparsity = problem.sparsity
        if sparsity is None:
            return "b is not block-sparse"
        reason = why_not_here(problem, device) or why_not_epilogue(problem)
        if reason is not None:
            return reason
        if not problem.prepacked:
            return "its units are packed once: gemmtune.prepack makes a weight that it takes"
        if MOST_JOINED * min(sparsity.block_n, sparsity.block_k) < UNIT:
            return f"blocks of {sparsity.sides}: a unit of {UNIT} would join more than {MOST_JOINED} along a side"
        if -(-problem.k // UNIT) >= 2 ** (31 - PLACE_BITS):
            return f"K is {problem.k}, more steps than a word has room for"
        if by_k(problem.a) is None:
            where = f"x has strides {problem.a.stride} and offset {problem.a.offset}"
            return f"{where}: TMA copies rows or columns that are aligned to {TMA_BYTES} bytes"
        return None

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - of all
        """Of 17 shapes that an H200 measured (``bsr.json``), Triton was 5 to 30% faster than the first of these on each."""
        if search == "exhaustive":
            return None
        return "Triton's kernels have been faster wherever both were measured: tried exhaustively alone"

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:
        """How it begins, the strips, what L2 asks for, and whether blocks go on from tile to tile."""
        yield dataclasses.replace(config, pdl=not config.pdl)
        yield dataclasses.replace(config, promotion=LINE_BYTES + MOST_PROMOTED - config.promotion)
        for strip in (config.strip // 2, config.strip * 2):
            if 0 < strip < 2 * tiles_n_of(problem, config.shape):
                yield dataclasses.replace(config, strip=strip)
        room = room_of(device, config.shape)
        if config.shape.cluster_k == 1 and tiles_of(problem, config.shape) * config.shape.cluster > room:
            yield dataclasses.replace(config, blocks=0 if config.blocks else room)

    def label(self, problem: Problem, config: Config) -> str:  # noqa: ARG002 - the same for all problems
        return str(config)

    def claims(self, problem: Problem, config: Config) -> Claims:
        """It leaves out units without a block; zeros are multiplied where units join blocks."""
        return dataclasses.replace(float32_sums(splits=config.shape.cluster_k), skips_absent=not joins(problem))

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the same for all problems
        shape = config.shape
        return {
            "tile": [shape.block_m, shape.block_n, UNIT],
            "stages": shape.stages,
            "warps": shape.threads // 32,
            "cluster": shape.cluster,
            "splits": shape.cluster_k,
            "blocks": config.blocks,
            "strip": config.strip,
            "pdl": config.pdl,
        }

    def packed_format(self, problem: Problem, config: Config) -> str | None:  # noqa: ARG002 - the same for all problems
        """Units by groups of as many rows of them as a tile has."""
        return format_of(config.shape.warp_groups)

    def pack(self, b: torch.Tensor, config: Config) -> torch.Tensor:
        return packed_units(b, config.shape.warp_groups)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        shape = config.shape
        return KernelSource(
            kernel=self.kernel,
            unit=(__package__, "bsr.cu.jinja"),
            files=(PRODUCTS, *((__package__, f"{name}.cuh.jinja") for name in ("device", "steps", "turned_store")), *TILE_SUMS),
            values=common_values(problem, Work, {"packed": "unsigned char const*"})
            | dataclasses.asdict(shape)
            | {
                "name": str(shape),
                "warp_groups": shape.warp_groups,
                "threads": shape.threads,
                "shared_bytes": shape.shared_bytes,
                "blocks_per_sm": shape.blocks_per_sm,
                "gives_registers": shape.gives_registers,
                "registers": shape.registers,
                "x_by_k": by_k(problem.a) is not False,
                "turned": turned(problem),
            },
        )

    def record(self, problem: Problem, config: Config) -> Record:
        shape, oriented = config.shape, orient(problem, swap_ab=True)
        tiles = tiles_of(problem, shape)
        work = Work()
        fill_common(work, oriented.out, oriented.added)
        work.rows, work.cols = problem.n, problem.m
        work.groups, work.tiles_n, work.tiles = groups_of(problem, shape), tiles_n_of(problem, shape), tiles
        work.columns, work.strip = columns_of(problem.k), min(config.strip, work.tiles_n)
        stored = (problem.out, TURNED) if turned(problem) else (oriented.out, 2)
        work.paired, aligned = aligned_out(Work.paired, *stored)
        told = Record(
            kernel=self.kernel,
            grid=(min(tiles * shape.cluster, config.blocks or MOST_TILES), 1, 1),
            cluster=shape.cluster,
            threads=shape.threads,
            shared_bytes=shape.shared_bytes,
            pdl=config.pdl,
            parameters=bytes(work),
            addresses=(*addresses_of(len(oriented.added)), Address(offset=Work.packed.offset, operand=B)),
            scalars=scalars_of(problem),
            aligned=aligned,
            alignment=((A, TMA_BYTES), (B, TMA_BYTES)),
        )
        units = [_map_of_units(problem, shape)] if shape.mapped else []
        return with_maps(told, [_map(problem, config), *units])


def turned(problem: Problem) -> bool:
    """Results of 16 bits are stored along the rows of the weight, which are contiguous."""
    return problem.out.stride[-1] == 1 and problem.out.dtype.itemsize == 2


def _map(problem: Problem, config: Config) -> TensorMap:
    """x in boxes of swizzled lines."""
    (row, col), (tokens, k) = problem.a.stride, problem.a.size
    along_k = by_k(problem.a) is not False
    return TensorMap(
        operand=A,
        dtype=problem.dtype,
        sizes=(k, tokens) if along_k else (tokens, k),
        pitches=((row if along_k else col) * problem.dtype.itemsize,),
        box=(UNIT, config.shape.block_n if along_k else UNIT),
        swizzle=Swizzle.BYTES_128,
        promotion_bytes=config.promotion,
    )


def _map_of_units(problem: Problem, shape: Shape) -> TensorMap:
    """The packed weight in lines of a unit, exchanged already. How many units there are is not known: at most all of them."""
    groups, columns = groups_of(problem, shape), columns_of(problem.k)
    before = units_at(groups, shape.warp_groups, columns) // LINE_BYTES
    return TensorMap(
        operand=B,
        dtype=problem.dtype,
        sizes=(UNIT, before + groups * shape.warp_groups * columns * UNIT),
        pitches=(LINE_BYTES,),
        box=(UNIT, UNIT),
        promotion_bytes=256,
    )
