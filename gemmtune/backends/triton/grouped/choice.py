"""Kernels of grouped products as choices, with the geometry of their launches."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....choice import Claims, Kernel, Scalars, Tensors
from ....device import DeviceInfo
from ....numerics.reduction import Reduction
from ....numerics.routed import gate_of
from ....problem import Epilogue, Layout, Problem
from ..artifact import Expected, instruction
from ..build import KernelChoice
from ..configs import Config, Geometry, geometry
from ..descriptors import is_transposed
from ..legality import Predicate
from ..persistent import operand_blocks
from ..printer import TRITON_DTYPES
from ..records import Blocks
from ..reductions import summed_by_steps
from .configs import GroupedConfig, most_tiles, oriented, scale_group_of, scale_rows_of, why_not_config

LEAST_GROUPS_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGeometry(Geometry):
    """Geometry with the arguments of grouped kernels.

    ``groups`` is the number of groups, and ``tokens`` the rows of a. ``scale_rows`` counts the scales of one column in a group's
    matrix, ``scale_size`` those of the whole matrix.
    """

    groups: int = 0
    scale_rows: int = 1
    scale_size: int = 1
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class GroupedChoice(KernelChoice):
    """Kernel of grouped products with one config."""

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        assert isinstance(config, GroupedConfig)
        return why_not_config(problem, device, config)

    def expected(self, device: DeviceInfo) -> Expected:
        """Return the predictions: the config fits, and on HIP it uses the dense template's instruction.

        The dense template's predicate does not describe these kernels exactly.
        """
        multiplies = instruction(Predicate(self.problem, device), self.config) if device.type == "hip" else None
        return Expected(instruction=multiplies, smem_bytes=device.smem_per_block_bytes)

    @property
    def of_groups(self) -> Mapping[str, Any]:
        """Template values: how groups are looked up, and the operands in addition to a and b."""
        problem = self.problem
        return {
            "groups_block": max(LEAST_GROUPS_BLOCK, 1 << (problem.groups - 1).bit_length()),
            "rows_type": index_type(problem.rows),
            "slots_type": index_type(problem.slots),
            "weights_type": TRITON_DTYPES[problem.weights.dtype] if problem.weights is not None else "",
            "widen": problem.widens_b,
            "scale_group": scale_group_of(problem),
            "scale_type": TRITON_DTYPES[problem.scale_b.dtype] if problem.scale_b is not None else "",
        }

    @property
    def batch_invariant(self) -> bool:
        """True for groups of rows: each row is summed over all of K. The number of terms of a group is data."""
        return not self.problem.divides_terms

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:
        """Return the sum of a row over steps of block_k, whatever rows its group has. None: groups divide the terms."""
        assert isinstance(config, GroupedConfig)
        if problem.divides_terms:
            return None
        if not problem.widens_b:
            return summed_by_steps(problem, where, oriented(config), device)
        how = Predicate(problem, device).instruction(oriented(config))
        every = config.block_k if scale_group_of(problem) else None
        return summed_by_steps(problem, where, config, device, promoted_every=every, own=f"triton groups by {how}")


@dataclass(frozen=True, kw_only=True)
class RowsChoice(GroupedChoice):
    """Choice of the template for groups of rows."""

    family = "grouped"
    template = "grouped/rows.py.jinja"

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:
        """Return the geometry: resident programs compute tile after tile, up to the number of tiles that no offsets exceed."""
        assert isinstance(config, GroupedConfig)
        return grouped_geometry(problem, config, min(most_tiles(problem, config), max(device.sm_count, 1) * config.resident))

    @property
    def values(self) -> Mapping[str, Any]:
        config, problem = self.config, self.problem
        assert isinstance(config, GroupedConfig)
        return {
            **self.of_groups,
            "described": config.described,
            "a_transposed": is_transposed(problem.a),
            "b_transposed": is_transposed(problem.b),
            "swap": config.swap,
            "flatten": config.flatten,
            "gate": Epilogue(nodes=gate_of(problem.gated).nodes) if problem.gated else None,
            "packed": bool(problem.encoding),
            "signed": problem.encoding == "int4",
            # The interpreter computes in numpy, which has no bfloat16.
            "product_type": TRITON_DTYPES[torch.float32 if self.target is None else problem.dtype] if problem.widens_b else "",
        }

    @property
    def blocks(self) -> Blocks:
        assert isinstance(self.config, GroupedConfig)
        blocks = operand_blocks(self.problem, self.config) if self.config.described else {}
        return {name: block for name, block in blocks.items() if name == "b" or self.problem.rows is None}


@dataclass(frozen=True, kw_only=True)
class CombinedChoice(RowsChoice):
    """Choice whose kernel stores each weighted row in its own slot. A second step adds up each token's rows in a fixed order."""

    family = "grouped_combined"

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Return the claims; weighted rows are rounded before they are added up."""
        return dataclasses.replace(super().claimed(problem, where), partials=problem.dtype)

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind the kernel, which writes to memory that each call allocates from torch, followed by torch's sum."""
        product, problem = super().bind(loaded).run, self.problem
        assert problem.weights is not None
        size, shape = (problem.m, problem.n), (*problem.weights.size, problem.n)

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            rows = torch.empty(size, dtype=problem.dtype, device=out.device)
            product(rows, tensors, scalars)
            torch.sum(rows.view(shape), dim=1, out=out)

        return Kernel(run=run)


@dataclass(frozen=True, kw_only=True)
class TermsChoice(GroupedChoice):
    """Choice of the template for groups of terms (slices of K)."""

    family = "grouped_k"
    template = "grouped/terms.py.jinja"


def grouped_geometry(problem: Problem, config: Config, programs: int) -> GroupedGeometry:
    where = {field.name: getattr(geometry(problem, config), field.name) for field in dataclasses.fields(Geometry)}
    return GroupedGeometry(
        **(where | {"programs": programs}),
        groups=problem.groups,
        scale_rows=scale_rows_of(problem),
        scale_size=1 if problem.scale_b is None else problem.scale_b.numel // problem.groups,
        tokens=problem.a.size[0],
    )


def index_type(index: Layout | None) -> str:
    """Return the kernel type of an index tensor; empty if there is none."""
    return "" if index is None else "tl.int64" if index.dtype == torch.int64 else "tl.int32"
