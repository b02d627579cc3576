"""Family of kernels for block-sparse weights and few tokens: supported problems, source and launches."""

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
from ..bsr.configs import FRAGMENT
from ..bsr.packing import block_of, claims_of_blocks, why_not_weight
from ..family import INT32_LIMIT, Family
from ..hopper import MMA
from ..kernel import KernelSource
from .configs import TOKENS, Config, candidates, estimate_us, loads_along_k, why_not_config
from .packing import HEAD_WORDS, WORD_BYTES, format_of, fragments_at, packed, panel_words, panels_of

LOAD_BYTES = 16
"""Bytes that a lane loads from a fragment."""


class Work(kernel.Work):
    """Parameters of the kernel. ``rows`` and ``cols`` follow the storage order, ``columns`` counts blocks; others are in bytes."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("packed", ctypes.c_void_p), ("x", ctypes.c_void_p), ("fragments_at", ctypes.c_longlong), ("x_pitch", ctypes.c_longlong),
        ("panel_bytes", ctypes.c_int), ("columns", ctypes.c_int), ("tokens", ctypes.c_int), ("rows", ctypes.c_int),
        ("cols", ctypes.c_int), ("paired", ctypes.c_bool),
    )  # fmt: skip


class BsrSkinny(Family[Config]):
    """Family of ``bsr_skinny.cu.jinja``. ``configs.py`` has its shapes, legality and ranking."""

    name = "bsr_skinny"
    likely = 1.5
    instruction = MMA
    legal_between = True
    why_not_config = staticmethod(why_not_config)
    candidates = staticmethod(candidates)
    estimate_us = staticmethod(estimate_us)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        if (reason := why_not_weight(problem, device)) is not None:
            return reason
        if problem.m > TOKENS[-1]:
            most = f"at most {TOKENS[-1]} are served"
            return f"x has {problem.m} tokens, {most}: sums of more would take the registers of weight blocks in flight"
        if problem.k >= INT32_LIMIT // WORD_BYTES:
            return f"K is {problem.k}: the columns of a panel would not fit 32 bits"
        if (along_k := loads_along_k(problem)) is None:
            where = f"x has strides {problem.a.stride} and offset {problem.a.offset}"
            together = block_of(problem) // 4
            return f"{where}: expected aligned rows of {together} elements along K, or an even number of contiguous tokens"
        if not along_k and problem.a.stride[-1] * 2 * problem.k >= INT32_LIMIT:
            return f"x spans {problem.a.stride[-1] * 2 * problem.k} bytes, offsets in it would not fit 32 bits"
        return None

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - always
        yield dataclasses.replace(config, pdl=not config.pdl)

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all problems
        return claims_of_blocks(config.shape.warps)

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the same for all problems
        shape = config.shape
        return self.facts(config, (FRAGMENT, shape.block_n, shape.block_k), splits=shape.warps)

    def packed_format(self, problem: Problem, config: Config) -> str | None:  # noqa: ARG002 - one for all configs
        return format_of(block_of(problem))

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return packed(b)

    def source(self, problem: Problem, config: Config) -> KernelSource:
        pointers = {"packed": "unsigned char const*", "x": "unsigned char const*"}
        return KernelSource(
            kernel=self.kernel,
            unit=(__package__, "bsr_skinny.cu.jinja"),
            files=(kernel.STORE[0], *kernel.files_of(__package__, "device", "sums", "results")),
            values=kernel.common_values(problem, Work, pointers)
            | kernel.values_of(config.shape, "blocks_per_sm")
            | {
                "block": block_of(problem),
                "head_bytes": HEAD_WORDS * WORD_BYTES,
                "x_by_k": bool(loads_along_k(problem)),
                "turned": stores_transposed(problem),
            },
        )

    def record(self, problem: Problem, config: Config) -> Record:
        along_k, block = loads_along_k(problem), block_of(problem)
        oriented = orient(problem, swap_ab=not stores_transposed(problem))
        work = Work()
        kernel.fill_common(work, oriented.out, oriented.added)
        work.rows, work.cols = oriented.out.size
        work.tokens, work.columns = problem.m, problem.k // block
        work.x_pitch = problem.a.stride[0 if along_k else 1] * problem.dtype.itemsize
        work.panel_bytes = panel_words(problem.k, block) * WORD_BYTES
        work.fragments_at = fragments_at(problem.n, problem.k, block)
        work.paired, aligned = kernel.aligned_out(Work.paired, oriented.out, 2)
        multiplied = (Address(offset=Work.x.offset, operand=A), Address(offset=Work.packed.offset, operand=B))
        return self.launch(
            config,
            work,
            grid=(panels_of(problem.n), 1, 1),
            cluster=1,
            addresses=(*kernel.addresses_of(len(oriented.added)), *multiplied),
            scalars=kernel.scalars_of(problem),
            aligned=aligned,
            alignment=((A, block // 4 * 2 if along_k else 4), (B, LOAD_BYTES)),
        )


def stores_transposed(problem: Problem) -> bool:
    """Return True if results are stored by tokens, because weight rows are contiguous in the result."""
    return problem.out.stride[-1] == 1
