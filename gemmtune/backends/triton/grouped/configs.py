"""Configs of the kernels for grouped products, and their legality."""

from dataclasses import dataclass, replace

import torch

from ....device import DeviceInfo
from ....problem import Problem
from ..arch import arch_of
from ..classes import INT32_LIMIT
from ..configs import Config
from ..descriptors import describable, is_transposed, stacked
from ..legality import LEAST_BLOCK, Predicate
from ..persistent import persistent_resources


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig(Config):
    """Config of a grouped product.

    With ``described`` tensor descriptors load a and b. With ``swap`` the group's matrix is the left operand of the instruction. Its
    columns fill the instruction if groups have few rows. ``resident`` programs per multiprocessor compute tile after tile. With
    ``flatten`` the copies for a tile may start while the previous tile is stored.
    """

    described: bool = False
    swap: bool = False
    flatten: bool = False
    resident: int = 1

    @property
    def variant(self) -> str:
        words = (("described", "_tma"), ("swap", "_swap"), ("flatten", "_flat"))
        return "".join(word for name, word in words if getattr(self, name)) + (f"_r{self.resident}" if self.resident > 1 else "")


def why_not_config(problem: Problem, device: DeviceInfo, config: GroupedConfig) -> str | None:
    if problem.divides_terms and (config.described or config.swap or config.flatten or config.resident > 1):
        return f"{config}: descriptors, swapped operands and resident programs serve only groups of rows"
    if not problem.divides_terms and most_tiles(problem, config) >= INT32_LIMIT // 2:
        return "more tiles than 32 bits can count"
    group = scale_group_of(problem)
    if group and group % config.block_k:
        return f"block_k {config.block_k}: does not divide the {group} elements that share a scale"
    if problem.encoding and (problem.k % config.block_k or config.block_k < 2 * LEAST_BLOCK):
        return f"block_k {config.block_k}: packed weights need whole blocks of at least {2 * LEAST_BLOCK}"
    if problem.scale_b is not None and problem.scale_b.numel >= INT32_LIMIT:
        return f"scale_b {problem.scale_b}: indices into it do not fit 32 bits"
    if config.described:
        return why_not_described(problem, device, config)
    config, predicate = multiplied(problem, config), Predicate(problem, device)
    reason = predicate.check(config)
    if reason is not None or not config.swap or device.type == "cpu":
        return reason
    return predicate.why_no_room(oriented(config))


def why_not_described(problem: Problem, device: DeviceInfo, config: GroupedConfig) -> str | None:
    """Return why descriptors cannot load a and b, or why the tile does not fit, or None."""
    if device.type != "cpu" and (device.type != "cuda" or not arch_of(device).warp_group):
        return f"{device.arch}: no copy engine that feeds a warp group"
    if problem.float8:
        reason = _why_not_float8_described(problem, device) or Predicate(problem, device).check_scales(config)
        if reason is not None:
            return reason
    elif problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype_label}: only 8-bit and 16-bit operands are served"
    if problem.encoding:
        return "packed weights are read as bytes"
    whole = stacked(problem.b)
    if whole is None or not describable(whole) or not (describable(problem.a) or problem.rows is not None):
        return f"a {problem.a}, b {problem.b}: rows or columns must be contiguous, aligned, and groups dense"
    if is_transposed(problem.a) and problem.rows is None:
        return "a is contiguous along M: TMA needs starts at multiples of 16 bytes, but a group starts at any row"
    if problem.gated and not is_transposed(problem.b) and problem.n * problem.dtype.itemsize % 16:
        return f"N = {problem.n}: the second half of b's columns does not start at a multiple of 16 bytes"
    if not is_transposed(problem.b) and problem.k % config.block_k:
        return f"block_k {config.block_k}: does not divide K = {problem.k}, and the next group's matrix follows"
    if max(whole.size) >= INT32_LIMIT // 2:
        return f"b {problem.b}: indices into it do not fit 32 bits"
    if device.type == "cpu":
        return None
    config = multiplied(problem, config)
    need, sums = persistent_resources(problem, device, config), config.block_m * config.block_n // (32 * config.warps)
    step = Predicate(problem, device).step_registers(config, "warp_group", sums)
    return replace(need, registers=need.registers + step).why_not_on(device)


def _why_not_float8_described(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why wgmma cannot read 8-bit operands straight from shared memory, or None: K is not contiguous (PTX ISA, wgmma)."""
    if device.type != "cpu" and Predicate(problem, device).product.itemsize > 1:
        return f"{device.arch}: 8-bit floats are converted in registers"
    if is_transposed(problem.a) or not is_transposed(problem.b):
        return f"a {problem.a}, b {problem.b}: 8-bit operands whose K is not contiguous go through registers"
    return None


def scale_rows_of(problem: Problem) -> int:
    """Return the scales of one column of a group's matrix."""
    return problem.scale_b.size[1] if problem.scale_b is not None else 1


def scale_group_of(problem: Problem) -> int:
    """Return the elements along K that share a scale in a column of weights; 0 for one scale per column."""
    return problem.k // scale_rows_of(problem) if problem.widens_b and scale_rows_of(problem) > 1 else 0


def multiplied(problem: Problem, config: GroupedConfig) -> GroupedConfig:
    """Return the config of the tile as it is multiplied: a gated product also multiplies the gate's columns."""
    return replace(config, block_n=2 * config.block_n) if problem.gated else config


def oriented(config: GroupedConfig) -> GroupedConfig:
    """Return the config with the rows of the instruction as block_m: columns of the group's matrix with ``swap``."""
    return replace(config, block_m=config.block_n, block_n=config.block_m) if config.swap else config


def most_tiles(problem: Problem, config: Config) -> int:
    """Return the maximum number of tiles of all groups for any offsets. Each group with rows may have one partial tile."""
    full = problem.m // config.block_m
    tiles_m = min(problem.m, full + min(problem.groups, problem.m))
    return tiles_m * -(-problem.n // config.block_n)
