"""What a launch of the kernel is told of a problem."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ....problem import Problem
from ....toolchain.record import A, B, Record, Swizzle, TensorMap, with_maps
from ..hopper import LINE_BYTES
from ..mixed import parameters
from ..mixed.parameters import PROMOTION_BYTES, alignment_of, fill_mixed, maps_along_k, pitch_bytes
from ..mixed.weights import weights_of
from ..parameters import addresses_of, aligned_out
from .configs import Config
from .legality import tiles_of

__all__ = ["KERNEL", "Work", "record"]

KERNEL = "gemmtune_wgmma"
CHUNK_BYTES = 16
"""What a thread stores at once: elements of the result, or before an epilogue float32 sums."""


class Work(parameters.Work):
    """``whole_chunks``: what a thread stores at once is neighbours in a row of the result, and aligned.

    ``sums_beside``: the sums of other blocks have a place beside the stages.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("whole_chunks", ctypes.c_bool), ("sums_beside", ctypes.c_bool))


def record(problem: Problem, config: Config) -> Record:
    """What its launch is told."""
    shape, weights, work = config.shape, weights_of(problem), Work()
    block_k, (rows, cols) = shape.block_k(weights), tiles_of(problem, config)
    operands = fill_mixed(work, problem, config, block_k)
    staged_bytes = problem.out.dtype.itemsize if problem.epilogue is None else torch.float32.itemsize
    work.whole_chunks, aligned = aligned_out(Work.whole_chunks, problem.out, CHUNK_BYTES // staged_bytes)
    work.sums_beside = shape.receives_beside(weights, config.cluster_k)
    maps = (
        TensorMap(
            operand=A,
            dtype=problem.dtype,
            sizes=(problem.k, problem.m),
            pitches=(pitch_bytes(problem.a),),
            box=(LINE_BYTES // 2, shape.block_m),
            swizzle=Swizzle.BYTES_128,
            promotion_bytes=PROMOTION_BYTES,
        ),
        TensorMap(
            operand=B,
            dtype=torch.uint8,
            sizes=(problem.k * weights.bits // 8, problem.n),
            pitches=(pitch_bytes(problem.b.transposed),),
            box=(shape.line_bytes, shape.block_n),
            swizzle=Swizzle.BYTES_128 if shape.line_bytes == LINE_BYTES else Swizzle.BYTES_64,
            promotion_bytes=PROMOTION_BYTES,
        ),
        *maps_along_k(problem, shape.block_n, block_k),
    )
    told = Record(
        kernel=KERNEL,
        grid=(config.cluster_k, rows, cols),
        cluster=config.cluster_k,
        threads=shape.threads,
        shared_bytes=shape.shared_bytes(weights, config.cluster_k),
        pdl=config.pdl,
        parameters=bytes(work),
        addresses=addresses_of(operands),
        aligned=aligned,
        alignment=alignment_of(problem),
    )
    return with_maps(told, maps)
