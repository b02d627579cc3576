"""Family of kernels for float32 by parts: supported problems, an H200's time model, packed operand, source and launches."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, even_parts, reduction_of
from ....problem import Layout, Problem
from ....toolchain.record import WORKSPACE, A, Address, B, Record, Swizzle, TensorMap
from ....toolchain.structs import Strides, strides_of, struct_text
from ...by_parts import parts_of, why_not_parts
from .. import kernel
from ..boxes import batches, by_k, grid_of, operands_of
from ..family import Family, float32_sums, why_not_device, why_not_epilogue, why_not_result
from ..hopper import GIVEN_REGISTERS, LEFT_REGISTERS, TMA_BYTES, WGMMA, clusters_at_a_time
from ..kernel import KernelSource
from .configs import (
    BLOCK_K,
    PLANE_LINES,
    SHAPES,
    SIDE,
    Config,
    Memory,
    Shape,
    copies_p,
    is_packed,
    lines_of,
    pitch_of,
    steps_of,
    tiles_of,
    why_not_config,
)

LAUNCH_US, SPLIT_US = 2.5, 2.0
"""Minimum time of a launch, and the additional time of the splitting kernel."""
SPLIT_GBPS = 3300.0
"""Rate at which numbers are read and their parts written."""
DRAM_GBPS = 3800.0
L2_GBPS = 5500.0
FLOPS_PER_NS, HALVES_PER_NS = 5000.0, 5400.0
"""Throughput of one multiprocessor in bfloat16 products: with whole steps, and with alternating halves."""
ALONE = 1.5
"""Slowdown with a single warp group on a multiprocessor: nothing multiplies while it splits and adds."""
SPLIT_STEP_NS = 90.0
"""Minimum time of a tile's step."""
TILE_US = 1.2
"""Time of the beginning and the end of a tile."""
KEPT_US = 0.5
"""Part of that time which a persistent block saves."""
EXCHANGE_GBPS = 60.0
"""Rate at which each block of a cluster sends its sums."""
KEPT_GBPS = 100.0
"""Rate at which a block adds sums to those in shared memory."""


def _splitting_us(problem: Problem, config: Config, rows: int, cols: int) -> float:
    if is_packed(problem, config):
        return 0.0
    bytes_of = 10 * cols + (8 * rows if copies_p(problem, config) else 0)
    return SPLIT_US + bytes_of * problem.k * problem.batch / SPLIT_GBPS / 1e3


def _filled(shape: Shape, problem: Problem, device: DeviceInfo, *, swap_ab: bool) -> Config:
    config = Config(shape=shape, swap_ab=swap_ab, pdl=True)
    persistent = shape.cluster_k == 1 and tiles_of(problem, config) > device.sm_count
    return Config(shape=shape, swap_ab=swap_ab, blocks=device.sm_count if persistent else 0, pdl=True)


FORMAT = "float32 by parts in planes of 32"
"""Layout name of a prepacked b."""


def planes(q: torch.Tensor) -> torch.Tensor:
    """Return q [.., cols, K] float32 as [.., steps, 3, cols', 32] bfloat16, with cols zero-padded to a multiple of 8.

    Of each 16 along K, one chunk of eight has the first two elements of every four, the other chunk has the second two. The chunks
    of a line are permuted like a 64-byte swizzle.
    """
    cols, k = q.shape[-2:]
    batch, lines, steps = q.shape[:-2], -(-cols // PLANE_LINES) * PLANE_LINES, 2 * -(-k // (2 * BLOCK_K))
    padded = q.new_zeros((*batch, lines, steps * BLOCK_K))
    padded[..., :cols, :k] = q
    # [.., line, step, 16 along K, four, half of it, element]
    ordered = padded.view(*batch, lines, steps, BLOCK_K // 16, 4, 2, 2).transpose(-2, -3)
    chunks = ordered.reshape(*batch, lines, steps, BLOCK_K // 8, 8)
    line, place = torch.arange(lines, device=q.device), torch.arange(BLOCK_K // 8, device=q.device)
    held = place ^ (line[:, None] // 2 % (BLOCK_K // 8))  # source chunk of each place
    swizzled = chunks.gather(-2, held[:, None, :, None].expand(*batch, lines, steps, BLOCK_K // 8, 8))
    parts = torch.stack(parts_of(swizzled.reshape(*batch, lines, steps, BLOCK_K)), dim=-4).bfloat16()
    return parts.movedim(-2, -4).contiguous()


GROUP = 8
"""Rows of tiles that are processed column by column."""
INSTRUCTION = {torch.float32: WGMMA[torch.bfloat16]}
SPLITTING_THREADS = 256


class Source(ctypes.Structure):
    """Operand of the splitting kernel: ``lines`` of ``k`` elements."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("data", ctypes.c_void_p), ("strides", Strides), ("lines", ctypes.c_int), ("k", ctypes.c_int),
    )  # fmt: skip


class Split(ctypes.Structure):
    """Parameters of the splitting kernel. Its first ``q_blocks`` blocks split q into ``planes``, the others copy p."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("planes", ctypes.c_void_p), ("copy", ctypes.c_void_p), ("q", Source), ("p", Source), ("q_blocks", ctypes.c_int),
        ("steps", ctypes.c_int), ("plane_lines", ctypes.c_int), ("p_pitch", ctypes.c_int),
    )  # fmt: skip


class Work(kernel.Work):
    """Parameters of the main kernel, which computes p [rows, K] times the transpose of q [cols, K]."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("planes", ctypes.c_void_p), ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("tiles_m", ctypes.c_int),
        ("tiles_n", ctypes.c_int), ("tiles", ctypes.c_int), ("steps", ctypes.c_int), ("plane_lines", ctypes.c_int),
        ("p_batched", ctypes.c_bool), ("q_batched", ctypes.c_bool), ("paired", ctypes.c_bool),
    )  # fmt: skip


class Parts(Family[Config]):
    """Family of ``parts.cu.jinja``. ``configs.py`` has the legality."""

    name = "parts"
    package = __package__
    likely = 1.6
    instruction = INSTRUCTION
    why_not_config = staticmethod(why_not_config)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        return why_not_device(device) or why_not_parts(problem, device) or why_not_result(problem) or why_not_epilogue(problem)

    def candidates(self, problem: Problem, device: DeviceInfo) -> list[Config]:
        found = [_filled(shape, problem, device, swap_ab=swap_ab) for shape in SHAPES for swap_ab in (False, True)]
        return sorted(found, key=lambda config: (self.estimate_us(problem, device, config), config.swap_ab, str(config)))

    def estimate_us(self, problem: Problem, device: DeviceInfo, config: Config) -> float:
        shape, tiles = config.shape, tiles_of(problem, config)
        at_a_time = clusters_at_a_time(device.sm_count, shape.cluster_k)
        waves = -(-tiles // at_a_time)
        steps = -(-steps_of(problem) // shape.cluster_k)
        multiplying_ns = 12 * shape.block_m * shape.block_n * BLOCK_K / (FLOPS_PER_NS if shape.halves == 1 else HALVES_PER_NS)
        step_ns = max(multiplying_ns * (ALONE if shape.warp_groups == 1 else 1.0), SPLIT_STEP_NS)
        tile_us = TILE_US - (KEPT_US if config.blocks else 0.0) + steps * step_ns / 1e3
        if shape.cluster_k > 1:
            tile_us += 1.0 + shape.sent_bytes / EXCHANGE_GBPS / 1e3
        if shape.keeps:
            tile_us += (steps - 1) // shape.gathered_steps * shape.kept_bytes / KEPT_GBPS / 1e3
        p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
        rows, cols = p.size[-2], q.size[-2]
        read_us = (4 * rows + 6 * cols) * problem.k * problem.batch / DRAM_GBPS / 1e3
        copied_us = tiles * steps_of(problem) * shape.stage_bytes / L2_GBPS / 1e3
        return LAUNCH_US + _splitting_us(problem, config, rows, cols) + max(waves * tile_us, read_us, copied_us)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:
        yield dataclasses.replace(config, pdl=not config.pdl)
        if config.shape.cluster_k == 1 and tiles_of(problem, config) > device.sm_count:
            yield dataclasses.replace(config, blocks=0 if config.blocks else device.sm_count)

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all problems
        """Return the claims. After each step of K, sums of tensor cores are added to float32 sums that round to nearest."""
        claims = float32_sums(splits=config.shape.cluster_k)
        return dataclasses.replace(claims, input_mode="parts", promoted_every=BLOCK_K, flush_subnormals=True)

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:
        """Return sums of steps that are added to float32 sums, and the order in which blocks add these."""
        shape = config.shape
        if not self.batch_invariant(problem, config):
            return None
        order = f"rotated every {shape.block_n // shape.cluster_k} columns" if shape.cluster_k > 2 else ""
        parts = even_parts(problem.k, 2 * BLOCK_K, shape.cluster_k)
        own = f"cuda parts gathered over {shape.gathered_steps} steps"
        return reduction_of(problem, "cuda", unit="matrix", parts=parts, order=order, promoted_every=BLOCK_K, own=own)

    def batch_invariant(self, problem: Problem, config: Config) -> bool:  # noqa: ARG002 - the config decides
        """Return False if rows of a are the columns that blocks finish, each beginning with its own sums. Two sums commute."""
        return not (config.swap_ab and config.shape.cluster_k > 2)

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:
        shape = config.shape
        facts = self.facts(config, (shape.block_m, shape.block_n, BLOCK_K), cluster=shape.cluster_k, splits=shape.cluster_k)
        return facts | {"copies": Memory.of(problem, config).copies}

    def packed_format(self, problem: Problem, config: Config) -> str | None:
        return FORMAT if is_packed(problem, config) else None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return planes(b.mT)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        p = operands_of(problem, swap_ab=config.swap_ab)[0]
        values = kernel.common_values(problem, Work, {"planes": "unsigned char const*"})
        split = [struct_text(Source, {"data": "float const*"}), struct_text(Split, {"planes": "uint4*", "copy": "float*"})]
        return self.made(
            files=(kernel.PRODUCTS, *kernel.files_of(__package__, "device", "numbers", "split", "sums"), *kernel.TILE_SUMS),
            values=values
            | kernel.values_of(config.shape, "gathered_steps", "gives_registers", "kept_bytes")
            | {
                "structs": "\n\n".join([values["structs"], *split]),
                "block_k": BLOCK_K,
                "group": GROUP,
                "given_registers": GIVEN_REGISTERS,
                "left_registers": LEFT_REGISTERS,
                "p_by_k": by_k(p) is not False,
            },
            helpers=(f"{self.kernel}_split",),
        )

    def record(self, problem: Problem, config: Config) -> Record:
        shape, (p, q, oriented) = config.shape, operands_of(problem, swap_ab=config.swap_ab)
        memory, (tiles_m, tiles_n), tiles = Memory.of(problem, config), grid_of(problem, config), tiles_of(problem, config)
        first, second = (B, A) if config.swap_ab else (A, B)
        packed = is_packed(problem, config)
        work = kernel.work_of(Work, oriented.out, oriented.added)
        work.rows, work.cols, work.tiles_m, work.tiles_n, work.tiles = p.size[-2], q.size[-2], tiles_m, tiles_n, tiles
        work.steps, work.plane_lines = steps_of(problem), lines_of(q)
        work.p_batched, work.q_batched = bool(strides_of(p).batch), bool(strides_of(q).batch)
        work.paired, aligned = kernel.aligned_out(Work.paired, oriented.out, 2)
        planes_at = Address(offset=Work.planes.offset, operand=second if packed else WORKSPACE, more_bytes=memory.planes_at)
        return self.launch(
            problem,
            config,
            work,
            [_map(problem, p, first, shape.block_m, memory)],
            grid=(shape.cluster_k * (min(tiles, config.blocks) if config.blocks else tiles), 1, 1),
            cluster=shape.cluster_k,
            pdl=config.pdl or not packed,
            addresses=(planes_at,),
            aligned=aligned,
            scratch_bytes=memory.size_bytes,
            alignment=((second, TMA_BYTES),) * packed + ((first, TMA_BYTES),) * (not memory.copies),
            before=() if packed else (self._splitting(problem, config, memory),),
        )

    def _splitting(self, problem: Problem, config: Config, memory: Memory) -> Record:
        """Return the launch that splits q and, if needed, copies p."""
        p, q, _ = operands_of(problem, swap_ab=config.swap_ab)
        first, second = (B, A) if config.swap_ab else (A, B)
        work = Split(steps=steps_of(problem), plane_lines=lines_of(q), p_pitch=pitch_of(problem.k))
        for source, layout in ((work.q, q), (work.p, p)):
            source.strides, source.lines, source.k = strides_of(layout), layout.size[-2], problem.k
        blocks = [batches(x) * -(-x.size[-2] // SIDE) * -(-problem.k // SIDE) for x in (q, p)]
        work.q_blocks = blocks[0]
        data = Source.data.offset
        return Record(
            kernel=f"{self.kernel}_split",
            grid=(blocks[0] + (blocks[1] if memory.copies else 0), 1, 1),
            cluster=1,
            threads=SPLITTING_THREADS,
            shared_bytes=0,
            pdl=config.pdl,
            parameters=bytes(work),
            addresses=(
                Address(offset=Split.planes.offset, operand=WORKSPACE, more_bytes=memory.planes_at),
                Address(offset=Split.copy.offset, operand=WORKSPACE),
                Address(offset=Split.q.offset + data, operand=second),
                Address(offset=Split.p.offset + data, operand=first),
            ),
        )


def _map(problem: Problem, p: Layout, operand: int, block_m: int, memory: Memory) -> TensorMap:
    """Return the map of p or its copy, in boxes of swizzled lines."""
    strides, rows, k = strides_of(p), p.size[-2], problem.k
    along_k = by_k(p) is not False
    pitch = pitch_of(k) if memory.copies else strides.row if along_k else strides.col
    length, lines = (k, rows) if along_k else (rows, k)
    batch = pitch * lines if memory.copies else strides.batch or pitch * lines
    return TensorMap(
        operand=WORKSPACE if memory.copies else operand,
        dtype=torch.float32,
        sizes=(length, lines, batches(p)),
        pitches=(pitch * 4, batch * 4),
        box=(BLOCK_K, block_m if along_k else BLOCK_K, 1),
        swizzle=Swizzle.BYTES_128,
        promotion_bytes=256,
    )
