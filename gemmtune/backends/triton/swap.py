"""The mm template on the transposed problem: outᵀ = bᵀ aᵀ.

A warp group multiplies 64 rows at a time, mostly padding if a has few. Columns of b fill them, and a needs a tile of 16.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from ...choice import Kernel, Scalars, Tensors
from ...device import DeviceInfo
from ...problem import Layout, Problem
from ...problem.rules import why_not_dense
from ...toolchain.prepared import DriverLaunch
from .arch import arch_of, can_overlap
from .build import TritonChoice
from .configs import DEEPEST, Config, Resources, splits_for, tiles_of, unalike
from .legality import Predicate
from .rank import estimate_us, ranked
from .wrapped import WrappedChoice

MOST_ROWS = 32
"""Largest M for swapping; above it the rows of a fill a warp group."""
BLOCKS_M, BLOCKS_N, BLOCKS_K, STAGES = (64, 128), (16, 32), (64, 128, 256), (3, 4, 5, 6)
WARPS = 4
"""One warp group. A second one would share the same few columns and halve its tile without gain."""
MOST_ALIKE = 2


@dataclass(frozen=True, kw_only=True)
class SwappedChoice(WrappedChoice):
    """TritonChoice for the transposed problem."""

    suffix = "_swap"

    def at(self, problem: Problem, device: DeviceInfo) -> Self | str:
        inner = why_not_dense(problem) or self.inner.at(transposed(problem), device)
        return inner if isinstance(inner, str) else self.around(problem, inner, {"swap_ab": True})

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind to the current device with the first two operands exchanged. Transposing changes no address."""
        kernel = self.inner.bind(loaded)
        inner, launch = kernel.run, kernel.prepared

        def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
            a, b, *rest = tensors
            inner(out, (b, a, *rest), scalars)

        return Kernel(run=run, prepared=launch.swapped() if isinstance(launch, DriverLaunch) else None)


def transposed(problem: Problem) -> Problem:
    """Return the problem outᵀ = epilogue(alpha · bᵀ aᵀ + beta · inpᵀ) on the same memory. Only for dense operations."""
    size = problem.out.size

    def expanded_transpose(layout: Layout) -> Layout:
        return layout.expanded(size).transposed

    epilogue = problem.epilogue
    if epilogue is not None:
        epilogue = dataclasses.replace(epilogue, operands=tuple(expanded_transpose(x) for x in epilogue.operands))
    return dataclasses.replace(
        problem,
        a=problem.b.transposed,
        b=problem.a.transposed,
        out=problem.out.transposed,
        inp=expanded_transpose(problem.inp) if problem.inp is not None else None,
        epilogue=epilogue,
    )


def swapped_choices(problem: Problem, device: DeviceInfo, count: int | None) -> list[SwappedChoice]:
    """Return up to ``count`` choices with swapped operands (None: all), best by the model first; none if they cannot win."""
    # Few rows are wasteful only for an instruction that multiplies 64 rows at a time.
    multiplies_64_rows = device.type == "cuda" and arch_of(device).warp_group
    if why_not_dense(problem) is not None or not multiplies_64_rows or problem.m > MOST_ROWS:
        return []
    inner = transposed(problem)
    overlaps = can_overlap(device.capability)
    return [
        SwappedChoice.around(problem, TritonChoice.of(inner, device, dataclasses.replace(config, pdl=overlaps)), {"swap_ab": True})
        for config in unalike(_configs(inner, device), count, MOST_ALIKE)
    ]


@functools.lru_cache(maxsize=1024)
def _configs(inner: Problem, device: DeviceInfo) -> tuple[Config, ...]:
    predicate = Predicate(inner, device)
    legal: list[tuple[Config, Resources]] = []
    for block_m, block_n, block_k, stages in itertools.product(BLOCKS_M, BLOCKS_N, BLOCKS_K, STAGES):
        config = Config(block_m=block_m, block_n=block_n, block_k=block_k, stages=stages, warps=WARPS)
        if (
            block_k * stages > DEEPEST * 5 // 4
            or predicate.check(config) is not None
            or predicate.instruction(config) != "warp_group"
        ):
            continue
        need = predicate.resources(config)
        split = [dataclasses.replace(config, split_k=s) for s in splits_for(tiles_of(inner, config), device.sm_count)]
        legal += [(c, need) for c in split if predicate.check_split(c) is None]
    return tuple(config for _, config in ranked((estimate_us(predicate, c, need), c) for c, need in legal))
