"""Kernels of block-sparse products as choices with the indices of a launch, and the candidates in the order of a model."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from ....bounded import Bounded
from ....choice import Kernel, Offers, Refusal, Run, Scalars, Tensors
from ....device import DeviceInfo
from ....effort import EFFORT
from ....numerics.block_sparse import parts
from ....problem import Problem
from ....problem.layout import ALIGNED_BYTES
from ..arch import can_overlap
from ..artifact import Expected, instruction
from ..build import KernelChoice
from ..configs import Config, Geometry, geometry, repeats, splits_for, tiles_of
from ..launch import bind
from ..legality import LEAST_BLOCK, WARP_GROUP_ROWS, Predicate
from ..records import Record, record_of
from .configs import MOST_SPLITS, BlocksConfig, transpose_bytes, why_not_blocks, why_not_config
from .rows import packed, unit_of

INDICES = ("crow", "col")
"""Names of the kernel's index arguments, which follow the tensors of a call."""
MOST_BOUND = 64
"""Most launches that one kernel caches, one for each number of blocks it was called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksGeometry(Geometry):
    """Geometry with ``nnz``, the number of stored blocks, which is known at the call."""

    nnz: int = 0


@dataclass(frozen=True, kw_only=True)
class BlocksChoice(KernelChoice):
    """Choice of the blocks template with one config. For a prepacked weight ``block_n`` × ``block_k`` is the size of its panels."""

    family = "bsr"
    template = "blocks/blocks.py.jinja"
    config: BlocksConfig = field(repr=False)

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:  # noqa: ARG003 - shared signature
        """Return the geometry of the dense problem, because the stored blocks are not known yet."""
        assert isinstance(config, BlocksConfig)
        where = geometry(problem, config.whole)
        return BlocksGeometry(**{field.name: getattr(where, field.name) for field in dataclasses.fields(Geometry)})

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: Config) -> Self:
        """Return the choice that runs ``problem`` with ``config``. It skips absent blocks, unless panels merge several blocks."""
        choice, sparsity = super().of(problem, device, config), problem.blocks
        merges = problem.prepacked and bool(sparsity.block_n % config.block_n or sparsity.block_k % config.block_k)
        return dataclasses.replace(choice, claims=dataclasses.replace(choice.claims, skips_absent=not merges))

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        assert isinstance(config, BlocksConfig)
        return why_not_blocks(problem) or why_not_config(problem, device, config)

    @property
    def panel(self) -> tuple[int, int]:
        """Rows and columns of the blocks that the kernel walks: the weight's own, or the panels it is packed into."""
        sparsity = self.problem.blocks
        if self.problem.prepacked:
            return self.config.block_n, self.config.block_k
        return sparsity.block_n, sparsity.block_k

    @property
    def values(self) -> Mapping[str, Any]:
        (panel_n, panel_k), sparsity = self.panel, self.problem.blocks
        return {
            "panel_n": panel_n,
            "panel_k": panel_k,
            "parts_n": panel_n // self.config.block_n,
            "parts_k": panel_k // self.config.block_k,
            "index": "tl.int64" if sparsity.wide_index and not self.problem.prepacked else "tl.int32",
            "swap": self.config.swap,
            "widened": self._widening,
            "panels": self.config.panels,
            "unit": unit_of(sparsity.block_n, self.config) if self.config.rows != "neighbours" else 0,
        }

    @property
    def _widening(self) -> str:
        """Expression that converts 8-bit floats to float16, which represents all of them; empty for other dtypes."""
        quantized = self.spec.quantized
        if quantized is None:
            return ""
        text = "%s.to(tl.float16)"
        if quantized.by_bits:
            text = "e4m3_value(%s)" if self.problem.dtype == torch.float8_e4m3fn else "e5m2_value(%s)"
        return text if self.target is not None else f"{text}.to(tl.float32)"

    def expected(self, device: DeviceInfo) -> Expected:
        predicate, config = Predicate(self.problem, device), self.config.as_multiplied
        multiplies = instruction(predicate, config) if device.type == "hip" else None
        smem_bytes = max(predicate.resources(config).smem_bytes, transpose_bytes(self.problem, device, self.config))
        return Expected(instruction=multiplies, smem_bytes=smem_bytes)

    @property
    def packed_format(self) -> str | None:
        rows = f" {self.config.rows}" if self.config.rows != "neighbours" else ""
        return f"panels {self.config.block_n}x{self.config.block_k}{rows}" if self.problem.prepacked else None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return packed(b, self.config)

    @property
    def record(self) -> Record:
        """Launch for a weight without blocks."""
        return self._record(0)

    def _record(self, nnz: int) -> Record:
        assert isinstance(self.where, BlocksGeometry)
        where = dataclasses.replace(self.where, nnz=nnz)
        arguments, config = self.source.arguments, self.config
        return record_of(arguments, self.problem, where, pdl=config.pdl, blocks=self.blocks, buffers=self.buffers, behind=INDICES)

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind to the problem. Each new number of blocks is bound once at its first call."""
        (kernel,) = loaded
        ready = Bounded[int, Run](MOST_BOUND)

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            a, weight, *rest = tensors
            values, crow, col = parts(weight)
            nnz = values.shape[0]
            launch = ready.get(nnz)
            if launch is None:
                launch = ready[nnz] = bind(kernel, self._record(nnz), interpret=self.target is None).run
            if values.data_ptr() % ALIGNED_BYTES or not values.is_contiguous():
                values = values.clone(memory_format=torch.contiguous_format)
            launch(out, (a, values, *rest, crow.contiguous(), col.contiguous()), scalars)

        return Kernel(run=run)


BLOCKS_M, PANELS_N, PANELS_K = (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (16, 32, 64, 128)
STAGES, DEEP_STAGES = (4, 3), (5, 4, 3)
MOST_DEEP = 512
"""Largest M at which pipelines of five stages are tried. Tiles of few tokens leave shared memory for them."""
SMALL_M = 32
"""Largest M for which the weight is always the left operand of the instruction."""
MOST_ALIKE = 4
"""Most configs of one output tile that are tried first."""
MOST_ORDERED = 2
"""Most configs per output tile and row order, for configs that reorder the weight's rows."""
ORDERED_EVERY = 4
"""Interval of configs that reorder rows in the order of trials, if reordering changes anything."""
EXCESS = 0.75
"""Share of a panel's excess columns (not in all its rows) left if similar rows are grouped, for random blocks. Most have less."""
INTERPRETED = (
    BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    BlocksConfig(block_m=32, block_n=32, block_k=32, stages=1, warps=1, swap=True),
    BlocksConfig(block_m=16, block_n=16, block_k=32, stages=1, warps=1, split_k=2),
    BlocksConfig(block_m=16, block_n=16, block_k=16, stages=1, warps=1, rows="pairs"),
)
"""Configs for the interpreter, which only checks values."""


def block_offers(problem: Problem, device: DeviceInfo, search: str) -> Offers:
    """Return the kernels that a search tries for a block-sparse problem, best by the model first."""
    reason = why_not_blocks(problem)
    if reason is None and device.type != "cpu" and not (configs := ranked(problem, device)):
        reason = f"no config is legal for {problem} on {device.arch}"
    if reason is not None:
        return Offers(refusals=(Refusal(name="triton:bsr", reason=reason),))
    if device.type == "cpu":
        configs = tuple(config for config in INTERPRETED if why_not_config(problem, device, config) is None)
    chosen = configs[: EFFORT[search].configs["triton:blocks"]]
    return Offers(choices=tuple(BlocksChoice.of(problem, device, config) for config in chosen))


@functools.lru_cache(maxsize=256)
def ranked(problem: Problem, device: DeviceInfo) -> tuple[BlocksConfig, ...]:
    """Return legal configs by ``cost``, first the best few of each output tile, some of which reorder rows."""
    legal = [config for config in _pool(problem, device) if why_not_config(problem, device, config) is None]
    legal.sort(key=lambda config: cost(problem, device, config))
    order = sorted((config for config in legal if config.rows == "neighbours"), key=repeats(_kind, MOST_ALIKE))
    ordered = sorted((config for config in legal if config.rows != "neighbours"), key=repeats(_kind, MOST_ORDERED))
    for place, config in enumerate(ordered):
        order.insert((place + 1) * ORDERED_EVERY - 1, config)
    return tuple(order)


def _kind(config: BlocksConfig) -> tuple[object, ...]:
    return config.whole.tile, config.rows


def cost(problem: Problem, device: DeviceInfo, config: BlocksConfig) -> float:
    """Return a figure that grows with the time: bytes of read blocks and panels' zeros, per busy share of the device."""
    sparsity = problem.blocks
    absent = (1 - max(sparsity.density, 0.005)) ** max(config.block_k / sparsity.block_k, 1.0)
    whole = config.whole

    def share(rows: int) -> float:
        """Return the expected share of columns with a block in at least one of ``rows`` grouped rows."""
        excess = absent - absent ** max(rows / sparsity.block_n, 1.0)
        return float(1 - absent + excess * (1 if config.rows == "neighbours" else EXCESS))

    tokens = min(config.block_m, max(problem.m, 1))
    traffic = share(config.block_n) * (1 / tokens + 1 / 256) + share(whole.block_n) / whole.block_n
    programs = tiles_of(problem, whole) * config.split_k
    waves = -(-programs // device.sm_count) * device.sm_count / max(programs, 1)
    # In a skewed weight a long row keeps one program busy after the others end.
    uneven = 1.0 if sparsity.imbalance == "even" else 1 + 0.5 / config.split_k
    steps = (1 + 0.02 * (config.split_k - 1)) * (1 + 4 / config.block_k) * (1 + 0.01 * (4 - config.stages))
    # Two panels are left operands of instructions as wide as all tokens, or right operands of narrow instructions.
    narrow = 1.02 if config.rows == "pairs" and not config.swap else 1.0
    return float(traffic * waves * uneven * steps * narrow)


def _pool(problem: Problem, device: DeviceInfo) -> Iterator[BlocksConfig]:
    overlaps = device.type == "cuda" and can_overlap(device.capability)
    depths = DEEP_STAGES if problem.m <= MOST_DEEP else STAGES
    tokens = [block for block in BLOCKS_M if block == LEAST_BLOCK or block < 2 * problem.m]
    for block_m, block_n, block_k in itertools.product(tokens, PANELS_N, PANELS_K):
        elements = block_m * block_n
        warps = 8 if elements >= 128 * 256 else 4 if elements >= 1024 or problem.dtype == torch.float64 else 2
        plain = BlocksConfig(block_m=block_m, block_n=block_n, block_k=block_k, stages=1, warps=warps, pdl=overlaps)
        splits = [s for s in splits_for(tiles_of(problem, plain), device.sm_count) if s <= MOST_SPLITS]
        swaps = (True,) if problem.m <= SMALL_M else (False, True) if block_n >= WARP_GROUP_ROWS else (False,)
        for stages, split_k, swap in itertools.product(depths, splits, swaps):
            config = replace(plain, stages=stages, split_k=split_k, swap=swap)
            yield config
            yield replace(config, rows="alike")
            if 2 * block_n <= PANELS_N[-1] and problem.m > SMALL_M:
                yield replace(config, rows="pairs", warps=8 if elements >= 64 * 256 else warps)
