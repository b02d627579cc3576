"""Family of kernels for few rows and narrow tiles: supported problems, source and launches."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ....choice import Claims
from ....device import DeviceInfo
from ....numerics.reduction import Reduction, reduction_of
from ....problem import Layout, Problem
from ....problem.rules import why_not
from ....toolchain.record import A, B, Record, Swizzle, TensorMap
from .. import columns, kernel, skinny
from ..boxes import LINE, by_k
from ..family import beginnings, float32_sums, why_not_epilogue, why_not_here
from ..hopper import MMA, TMA_BYTES
from ..kernel import KernelSource, addresses_of, common_values, files_of, fill_common, scalars_of, values_of
from ..mixed.family import PROMOTION_BYTES, PTX, pitch_bytes
from .configs import Config, candidates, estimate_us, grid_of, why_not_config, why_not_likely

OPERATIONS = ("mm", "addmm")
MOST_ROWS = 96
"""Maximum rows of a. With more, wider tiles read fewer bytes."""


class Work(kernel.Work):
    """Parameters of the narrow kernel. A step of K fills a stage."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("rows", ctypes.c_int), ("cols", ctypes.c_int), ("steps", ctypes.c_int), ("prefetch_stages", ctypes.c_int),
    )  # fmt: skip


class Narrow(columns.ColumnsFamily[Config]):
    """Family of ``narrow.cu.jinja``. ``configs.py`` has its shapes, legality and ranking."""

    name = "narrow"
    legal_between = True
    likely = 1.3
    instruction = MMA
    why_not_likely = staticmethod(why_not_likely)
    why_not_config = staticmethod(why_not_config)
    candidates = staticmethod(candidates)
    estimate_us = staticmethod(estimate_us)

    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        if (reason := why_not(problem, OPERATIONS) or why_not_here(problem, device)) is not None:
            return reason
        if problem.m > MOST_ROWS:
            return f"a has {problem.m} rows, at most {MOST_ROWS} are served"
        for name, layout in (("a", problem.a), ("the transpose of b", columns.columns_of(problem))):
            if not by_k(layout):
                where = f"{name} has strides {layout.stride} and offset {layout.offset}"
                return f"{where}: TMA copies lines along K that are aligned to {TMA_BYTES} bytes"
        return why_not_epilogue(problem)

    def launch_variants(self, problem: Problem, device: DeviceInfo, config: Config) -> Iterator[Config]:  # noqa: ARG002 - always
        yield from beginnings(config, config.shape.stages)

    def claims(self, problem: Problem, config: Config) -> Claims:  # noqa: ARG002 - the same for all problems
        return float32_sums()

    def reduction(self, problem: Problem, config: Config) -> Reduction | None:  # noqa: ARG002 - the same for all configs
        return reduction_of(problem, "cuda")

    def info(self, problem: Problem, config: Config) -> dict[str, Any]:  # noqa: ARG002 - the config has it all
        return self.facts(config, (config.shape.block_m, config.shape.block_n, config.shape.block_k))

    def source(self, problem: Problem, config: Config) -> KernelSource:
        return KernelSource(
            kernel=self.kernel,
            unit=(__package__, "narrow.cu.jinja"),
            files=(PTX, *files_of(skinny.__name__, "device")),
            values=common_values(problem, Work) | values_of(config.shape, "blocks_per_sm"),
        )

    def record(self, problem: Problem, config: Config) -> Record:
        shape, extra = config.shape, problem.epilogue.operands if problem.epilogue else ()
        added = extra if problem.inp_read is None else (problem.inp_read, *extra)
        work = Work()
        fill_common(work, problem.out, [x.expanded(problem.out.size) for x in added])
        work.rows, work.cols, work.prefetch_stages = problem.m, problem.n, config.prefetch_stages
        work.steps = -(-problem.k // shape.block_k)
        return self.launch(
            config,
            work,
            (_map_of(A, problem.a, shape.block_m), _map_of(B, columns.columns_of(problem), shape.block_n)),
            grid=(*grid_of(problem, config), 1),
            cluster=1,
            addresses=addresses_of(len(added)),
            scalars=scalars_of(problem),
            alignment=((A, TMA_BYTES), (B, TMA_BYTES)),
        )


def _map_of(operand: int, layout: Layout, lines: int) -> TensorMap:
    """Return the map of an operand [lines, K] in boxes of swizzled lines."""
    return TensorMap(
        operand=operand,
        dtype=layout.dtype,
        sizes=layout.size[::-1],
        pitches=(pitch_bytes(layout),),
        box=(LINE, lines),
        swizzle=Swizzle.BYTES_128,
        promotion_bytes=PROMOTION_BYTES,
    )
