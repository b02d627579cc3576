"""The kernels of grouped products as choices: their configs, and what a launch is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....device import DeviceInfo
from ....problem import Problem
from ..artifact import Expected
from ..build import KernelChoice
from ..configs import Config, Geometry, geometry
from ..descriptors import turned
from ..launch import Blocks
from ..persistent import operand_blocks
from ..printer import TRITON_DTYPES

LEAST_GROUPS_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig(Config):
    """``described``: a and b come through tensor descriptors. ``swap``: the matrix of a group is the left operand of the
    instruction, so that its columns fill it where groups have few rows. ``resident`` programs of each multiprocessor go from tile
    to tile, and with ``flatten`` copies for a tile may start while the one before it is stored.
    """

    described: bool = False
    swap: bool = False
    flatten: bool = False
    resident: int = 1

    @property
    def variant(self) -> str:
        """What the name has beside that of the mm template."""
        words = (("described", "_tma"), ("swap", "_swap"), ("flatten", "_flat"))
        return "".join(word for name, word in words if getattr(self, name)) + (f"_r{self.resident}" if self.resident > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGeometry(Geometry):
    """``groups`` is the number of groups, ``scale_rows`` how many scales a column of one has."""

    groups: int = 0
    scale_rows: int = 1


@dataclass(frozen=True, kw_only=True)
class RowsChoice(KernelChoice):
    """The template of groups of rows."""

    family = "grouped"
    template = "grouped/rows.py.jinja"

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:
        """The programs that are resident go from tile to tile, of which there are at most so many whatever the offsets are."""
        assert isinstance(config, GroupedConfig)
        where = {field.name: getattr(geometry(problem, config), field.name) for field in dataclasses.fields(Geometry)}
        programs = min(most_tiles(problem, config), max(device.sm_count, 1) * config.resident)
        return GroupedGeometry(**(where | {"programs": programs}), groups=problem.groups, scale_rows=scale_rows_of(problem))

    @property
    def values(self) -> Mapping[str, Any]:
        """How groups are looked up, how blocks lie and come, and which operand is on the left."""
        config, problem = self.config, self.problem
        assert isinstance(config, GroupedConfig)
        return {
            "groups_block": max(LEAST_GROUPS_BLOCK, 1 << (problem.groups - 1).bit_length()),
            "described": config.described,
            "a_turned": turned(problem.a),
            "b_turned": turned(problem.b),
            "swap": config.swap,
            "flatten": config.flatten,
            "widen": problem.widens_b,
            "packed": bool(problem.encoding),
            "signed": problem.encoding == "int4",
            "scale_group": scale_group_of(problem),
            "scale_type": TRITON_DTYPES[problem.scale_b.dtype] if problem.scale_b is not None else "",
            # numpy, on which the interpreter computes, has no bfloat16.
            "product_type": TRITON_DTYPES[torch.float32 if self.target is None else problem.dtype],
        }

    @property
    def blocks(self) -> Blocks:
        """Blocks of a and b, where they come through descriptors."""
        assert isinstance(self.config, GroupedConfig)
        return operand_blocks(self.problem, self.config) if self.config.described else {}

    def expected(self, device: DeviceInfo) -> Expected:
        """Nothing but that it fits: the predicate is that of the dense template, of which this is no instance."""
        return Expected(instruction=None, smem_bytes=device.smem_per_block_bytes)

    @property
    def batch_invariant(self) -> bool:
        """Not claimed: how many rows a group has is data."""
        return False


@dataclass(frozen=True, kw_only=True)
class TermsChoice(KernelChoice):
    """The template of groups of terms."""

    family = "grouped_k"
    template = "grouped/terms.py.jinja"

    def expected(self, device: DeviceInfo) -> Expected:
        """As for groups of rows."""
        return Expected(instruction=None, smem_bytes=device.smem_per_block_bytes)

    @property
    def batch_invariant(self) -> bool:
        """Not claimed, as for groups of rows."""
        return False


def scale_rows_of(problem: Problem) -> int:
    """Scales of one column of a group's matrix."""
    return problem.scale_b.size[1] if problem.scale_b is not None else 1


def scale_group_of(problem: Problem) -> int:
    """Elements along K of a column that share a scale; 0 where a column has one."""
    return problem.k // scale_rows_of(problem) if scale_rows_of(problem) > 1 else 0


def most_tiles(problem: Problem, config: Config) -> int:
    """Tiles of all groups at most, whatever the offsets are: each group may have one that is not full, and none without rows."""
    full = problem.m // config.block_m
    tiles_m = min(problem.m, full + min(problem.groups, problem.m))
    return tiles_m * -(-problem.n // config.block_n)
