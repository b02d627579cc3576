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

KERNEL = "gemmtune_skinny"


class Work(parameters.Work):
    """``paired``: neighbours in a row of the result can be stored as pairs."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("paired", ctypes.c_bool),)


def record(problem: Problem, config: Config) -> Record:
    """What its launch is told."""
    shape, weights, work = config.shape, weights_of(problem), Work()
    block_k, chunk = weights.block_k(), weights.chunk
    operands = fill_mixed(work, problem, config, block_k)
    work.paired, aligned = aligned_out(Work.paired, problem.out, 2)
    # a's rows in chunks, all rows of one chunk after the other; b's columns as lines.
    maps = (
        TensorMap(
            operand=A,
            dtype=problem.dtype,
            sizes=(chunk, problem.m, problem.k // chunk),
            pitches=(pitch_bytes(problem.a), chunk * 2),
            box=(chunk, shape.block_m, block_k // chunk),
            promotion_bytes=PROMOTION_BYTES,
        ),
        TensorMap(
            operand=B,
            dtype=torch.uint8,
            sizes=(problem.k * weights.bits // 8, problem.n),
            pitches=(pitch_bytes(problem.b.transposed),),
            box=(LINE_BYTES, shape.block_n),
            swizzle=Swizzle.BYTES_128,
            promotion_bytes=PROMOTION_BYTES,
        ),
        *maps_along_k(problem, shape.block_n, block_k),
    )
    told = Record(
        kernel=KERNEL,
        grid=(config.cluster_k, tiles_of(problem, config), 1),
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
