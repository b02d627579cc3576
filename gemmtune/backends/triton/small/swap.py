"""The mm template on the transposed problem: outᵀ = bᵀ aᵀ.

A warp group multiplies 64 rows at a time. With few rows in a most of those would be nothing; with the columns of b as its rows they
are all of use, and a needs only a tile of 16.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from ....choice import Kernel, Run, Scalars, Tensors
from ....device import DeviceInfo
from ....problem import Layout, Problem
from ....problem.rules import why_not_dense
from ....toolchain.compiled import Artifact, CompiledChoice
from ..arch import arch_of, can_overlap
from ..build import TritonChoice, choice_for
from ..configs import DEEPEST, Config, splits_for
from ..legality import Predicate, Resources
from ..rank import estimate_us

__all__ = ["SwappedChoice", "swapped_choices", "swapped_configs", "transposed"]

MOST_ROWS = 32
"""Above, the rows of a fill a warp group as they are."""
BLOCKS_M, BLOCKS_N, BLOCKS_K, STAGES = (64, 128), (16, 32), (64, 128, 256), (3, 4, 5, 6)
WARPS = 4
"""One warp group: a second one would have the same few columns, and halve its tile for nothing."""
MOST_ALIKE = 2


@dataclass(frozen=True, kw_only=True)
class SwappedChoice(CompiledChoice):
    """A TritonChoice for the transposed problem."""

    inner: TritonChoice = field(repr=False)

    @functools.cached_property
    def content_hash(self) -> str:
        """That of the kernel, and that its operands are swapped."""
        return hashlib.sha256(f"swapped {self.inner.content_hash}".encode()).hexdigest()

    @property
    def compile_key(self) -> str | None:
        """That of the kernel."""
        return self.inner.compile_key

    @property
    def compiled(self) -> bool:
        """Was the kernel compiled here before?"""
        return self.inner.compiled

    @property
    def arch(self) -> str:
        """That of the kernel."""
        return self.inner.arch

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The mm kernel."""
        return self.inner.artifacts(device)

    def launch_variants(self) -> Sequence[Self]:
        """Those of the kernel."""
        return tuple(
            dataclasses.replace(self, name=f"{inner.name}_swap", info={**self.info, "pdl": inner.config.pdl}, inner=inner)
            for inner in self.inner.launch_variants()
        )

    def forward(self) -> Self:
        """The kernel from its PTX."""
        return dataclasses.replace(self, inner=self.inner.forward())

    def compile(self) -> None:
        """Compile the kernel. Raises CompileError."""
        self.inner.compile()

    def load(self) -> Any:
        """The kernel of the transposed problem. Raises what its ``load`` does."""
        return self.inner.load()

    def bind(self, loaded: Any) -> Kernel:
        """Bind the kernel to the current device."""
        return Kernel(run=swapped(self.inner.bind(loaded).run))


def swapped(inner: Run) -> Run:
    """``inner`` with the first operand in the place of the second. Transposing changes no address."""

    def run(out: Tensor, tensors: Tensors, scalars: Scalars) -> None:
        a, b, *rest = tensors
        inner(out, (b, a, *rest), scalars)

    return run


def transposed(problem: Problem) -> Problem:
    """The problem of outᵀ = epilogue(alpha · bᵀ aᵀ + beta · inpᵀ), on the same memory. Only for the dense operations."""
    size = problem.out.size

    def turned(layout: Layout) -> Layout:
        return layout.expanded(size).transposed

    epilogue = problem.epilogue
    if epilogue is not None:
        epilogue = dataclasses.replace(epilogue, operands=tuple(turned(x) for x in epilogue.operands))
    return dataclasses.replace(
        problem,
        a=problem.b.transposed,
        b=problem.a.transposed,
        out=problem.out.transposed,
        inp=turned(problem.inp) if problem.inp is not None else None,
        epilogue=epilogue,
    )


def swapped_choices(problem: Problem, device: DeviceInfo, count: int | None) -> list[SwappedChoice]:
    """Up to ``count`` choices with swapped operands, the best by the model first; all for None, none where they cannot win."""
    if why_not_swapped(problem, device) is not None:
        return []
    inner = transposed(problem)
    overlaps = can_overlap(device.capability)
    return [
        swapped_choice(problem, choice_for(inner, device, dataclasses.replace(config, pdl=overlaps)))
        for config in spread(swapped_configs(inner, device), count)
    ]


def swapped_choice(problem: Problem, inner: TritonChoice) -> SwappedChoice:
    """The choice that runs ``inner``, made for the transposed problem."""
    return SwappedChoice(
        name=f"{inner.name}_swap",
        backend=inner.backend,
        problem=problem,
        claims=inner.claims,
        info={**inner.info, "swapped": True},
        inner=inner,
    )


def why_not_swapped(problem: Problem, device: DeviceInfo) -> str | None:
    """Why swapping the operands has nothing to gain here, or None."""
    reason = why_not_dense(problem)
    if reason is not None:
        return reason
    if device.type != "cuda" or not arch_of(device).warp_group:
        return f"{device.arch}: no instruction multiplies 64 rows at a time"
    if problem.m > MOST_ROWS:
        return f"m = {problem.m}: more than {MOST_ROWS} rows fill a warp group as they are"
    return None


@functools.lru_cache(maxsize=1024)
def swapped_configs(inner: Problem, device: DeviceInfo) -> tuple[Config, ...]:
    """The legal configs for a transposed problem, the best by the model first."""
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
        tiles = -(-inner.m // block_m) * -(-inner.n // block_n) * inner.batch
        split = [dataclasses.replace(config, split_k=s) for s in splits_for(tiles, device.sm_count)]
        legal += [(c, need) for c in split if predicate.check_split(c) is None]
    timed = sorted(((estimate_us(predicate, c, need), str(c), c) for c, need in legal), key=lambda item: item[:2])
    return tuple(config for _, _, config in timed)


def spread(configs: Sequence[Config], count: int | None) -> list[Config]:
    """The first ``count`` configs of which no three differ in their stages alone; all for None."""
    if count is None:
        return list(configs)
    chosen: list[Config] = []
    alike: Counter[tuple[int, ...]] = Counter()
    for config in configs:
        shape = (*config.tile, config.block_k, config.split_k)
        if len(chosen) < count and alike[shape] < MOST_ALIKE:
            chosen.append(config)
            alike[shape] += 1
    return chosen
