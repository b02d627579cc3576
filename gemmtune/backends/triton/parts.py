"""float32 on tensor cores: the mm template with each operand split into three bfloat16 parts before the multiplication.

x = high + middle + low. Each part holds the next eight significand bits, truncated instead of rounded. So all parts have x's sign,
none overflows, and their sum is x. The kernel adds six of the nine products of parts, small ones first. Each loop step has its own
sum, which a round-to-nearest addition adds to the tile's sum. The omitted products are below 2^-21 of the result, and zero if one
factor has eight bits.

The low part holds infinities and NaN, and meets only high parts. The high part of such a value is ±1 (an infinity without its
highest exponent bit). So an infinity meets a zero only if the operands contain both.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from ...choice import Claims
from ...device import DeviceInfo
from ...numerics.reduction import Reduction
from ...problem import Problem
from ...toolchain.render import template
from ..by_parts import why_not_one_by_one, why_not_parts
from .build import KernelChoice
from .configs import SPLITS, Config, Geometry, Resources, blocks_along_k, fragment_registers, pool, splits_for, tiles_of
from .legality import TENSOR_MEMORY, Predicate
from .printer import PACKAGE
from .rank import select
from .reductions import summed_by_steps
from .spec import Staging

PART_BYTES = 2
PARTS = 3
DOTS = 6
MOST_TILE = 128 * 128
"""Largest tile: one step's sum occupies registers in addition to the tile's sum."""
MOST_TERMS = 64
"""Most terms of one step. A tensor core truncates its sums. Those of 128 terms were less exact than torch's short ones."""
INTERPRETER_CONFIGS = (
    Config(block_m=16, block_n=16, block_k=32, stages=1, warps=1),
    Config(block_m=32, block_n=16, block_k=64, stages=2, warps=4, split_k=2),
)


class PartsPredicate(Predicate):
    """Predicate of the mm template for products of bfloat16 parts, made in registers from float32 operands."""

    dots = DOTS
    parts = PARTS

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        super().__init__(problem, device)
        self.product = torch.bfloat16

    def check(self, config: Config) -> str | None:
        if self.arch.warp_group and self.device.capability >= TENSOR_MEMORY:
            return f"{self.device.arch}: Triton's code for parts does not use tcgen05, the multiply instruction there"
        if config.block_k > MOST_TERMS:
            return f"block_k {config.block_k}: a step's sum is truncated and takes at most {MOST_TERMS} terms"
        if config.block_m * config.block_n > MOST_TILE:
            return f"tile {config.block_m}x{config.block_n}: two sums of more than {MOST_TILE} elements do not fit the registers"
        return super().check(config)

    def terms(self, config: Config) -> int:
        """Return the elements of K whose step sums go into one sum one by one."""
        return -(-blocks_along_k(self.problem, config.block_k) // config.split_k) * config.block_k

    def check_steps(self, config: Config) -> str | None:
        """Return why the steps of a split may not go into its sum one by one, or None."""
        return why_not_one_by_one(self.problem, self.device, self.terms(config))

    def _smem_bytes(self, config: Config, how: str, staging: tuple[Staging, Staging]) -> int:
        """Return the shared memory: stages of float32, as for mma, and for a warp group the parts of b that it reads there."""
        sizes = [block * config.block_k for block in config.tile]
        buffers = (max(config.stages - 1, 1) if staged.asynchronous else 1 for staged in staging)
        total = sum(4 * size * count for size, count in zip(sizes, buffers, strict=True))
        if how == "warp_group":
            total += PARTS * PART_BYTES * sizes[1] * self.arch.sync_buffers  # a comes from registers
        return max(total, 4 * config.block_m * config.block_n) + self.arch.barrier_bytes

    def _registers(self, config: Config, how: str, staging: tuple[Staging, Staging]) -> int:
        """Return one thread's registers, which also hold a step's sum and the additional parts."""
        threads = config.warps * self.device.warp_size
        total = super()._registers(config, how, staging) + config.block_m * config.block_n // threads
        if how == "mma":
            return total + (PARTS - 1) * fragment_registers(config, PART_BYTES, 32) + fragment_registers(config, 4, 32)
        return total + (PARTS - 1) * sum(config.tile) * config.block_k * PART_BYTES // 4 // threads


@dataclass(frozen=True, kw_only=True)
class PartsChoice(KernelChoice):
    """Choice of the mm template on parts with one config."""

    family = "parts"
    template = "mm.py.jinja"
    predicate = PartsPredicate

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Return claims for six products of parts. Some tensor cores lose subnormal numbers, and all lose the tiniest parts."""
        claims = super().claimed(problem, where)
        return dataclasses.replace(claims, input_mode="parts", flush_subnormals=True)

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: Config) -> Self:
        """Return the choice. Its claims state after how many elements of K a step's sum is rounded into the tile's."""
        choice = super().of(problem, device, config)
        return dataclasses.replace(choice, claims=dataclasses.replace(choice.claims, promoted_every=config.block_k))

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:
        """Return sums of steps, each of six products of parts, that are added to the tile's sum."""
        return summed_by_steps(problem, where, config, device, promoted_every=config.block_k, own="triton parts")

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        predicate = PartsPredicate(problem, device)
        return why_not_parts(problem, device) or predicate.check(config) or predicate.check_steps(config)

    @property
    def values(self) -> Mapping[str, Any]:
        return {"parts": True}

    @property
    def preamble(self) -> str:
        interpreted = self.target is None
        names = ("high", "middle", "rest - middle")
        high, middle, low = names if interpreted else [f"({name}).to(tl.bfloat16)" for name in names]
        ieee = ', input_precision="ieee"' if interpreted else ""
        return template(PACKAGE, "parts.jinja").render(high=high, middle=middle, low=low, ieee=ieee)


def parts_choices(problem: Problem, device: DeviceInfo, count: int | None) -> list[PartsChoice]:
    """Return up to ``count`` choices (None: all), best by the model first; none if parts do not serve the problem."""
    if why_not_parts(problem, device) is not None:
        return []
    if device.type == "cpu":
        predicate = PartsPredicate(problem, device)
        configs: tuple[Config, ...] = tuple(config for config in INTERPRETER_CONFIGS if predicate.check(config) is None)
    else:
        configs = _configs(problem, device, count)
    return [PartsChoice.of(problem, device, config) for config in configs]


@functools.lru_cache(maxsize=1024)
def _configs(problem: Problem, device: DeviceInfo, count: int | None) -> tuple[Config, ...]:
    predicate = PartsPredicate(problem, device)
    legal: list[tuple[Config, Resources]] = []
    for config in pool():
        if predicate.check(config) is None:
            need = predicate.resources(config)
            candidates = splits_for(tiles_of(problem, config), device.sm_count)
            exact = (s for s in SPLITS if predicate.check_steps(dataclasses.replace(config, split_k=s)) is None)
            splits = (dataclasses.replace(config, split_k=s) for s in {*candidates, next(exact, SPLITS[-1])})
            legal += [(split, need) for split in splits if not (predicate.check_split(split) or predicate.check_steps(split))]
    return tuple(select(predicate, legal, count)) if legal else ()
