"""The kernel of block-sparse products as a choice, and what a launch is told of the indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ....choice import Choice, Kernel, Run, Scalars, Tensors
from ....device import DeviceInfo
from ....numerics.block_sparse import parts
from ....problem import Problem
from ....problem.layout import ALIGNED_BYTES
from ..artifact import Expected, instruction
from ..build import KernelChoice
from ..configs import Config, Geometry, geometry
from ..launch import bind
from ..legality import Predicate
from ..records import Record, record_of
from .configs import AXES, BlocksConfig, turned_bytes, why_not_blocks, why_not_config
from .rows import packed, unit_of

INDICES = ("crow", "col")
"""The names of the kernel's indices, which it gets behind the tensors of a call."""
MOST_BOUND = 64
"""Launches that one kernel keeps ready, one for each number of blocks that it was called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksGeometry(Geometry):
    """``nnz`` is the number of blocks that exist, which a call tells."""

    nnz: int = 0


@dataclass(frozen=True, kw_only=True)
class BlocksChoice(KernelChoice):
    """The blocks template with one config. Of a prepacked weight ``block_n`` × ``block_k`` is the size of its panels."""

    family = "bsr"
    template = "blocks/blocks.py.jinja"
    config: BlocksConfig = field(repr=False)

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:  # noqa: ARG003 - as the others
        """The same division as of the dense problem: which blocks exist is not known yet."""
        assert isinstance(config, BlocksConfig)
        where = geometry(problem, config.whole)
        return BlocksGeometry(**{field.name: getattr(where, field.name) for field in dataclasses.fields(Geometry)})

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: Config) -> Self:
        """The choice that runs ``problem`` with ``config``. It leaves out what does not exist, unless panels join blocks."""
        choice, sparsity = super().of(problem, device, config), problem.sparsity
        assert sparsity is not None
        joins = problem.prepacked and bool(sparsity.block_n % config.block_n or sparsity.block_k % config.block_k)
        return dataclasses.replace(choice, claims=dataclasses.replace(choice.claims, skips_absent=not joins))

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        """What the configs that are tried are asked."""
        assert isinstance(config, BlocksConfig)
        return why_not_blocks(problem) or why_not_config(problem, device, config)

    @property
    def axes(self) -> Mapping[str, Sequence[int]]:
        """Those of the config, on a GPU."""
        return {} if self.target is None else AXES

    @property
    def parameters(self) -> Mapping[str, int]:
        """What the config has of them."""
        return {name: getattr(self.config, name) for name in self.axes}

    def moved(self, parameters: Mapping[str, int], device: DeviceInfo) -> Choice | str:
        """The choice with a config that has these parameters."""
        changes: dict[str, Any] = dict(parameters)
        config = dataclasses.replace(self.config, **changes)
        return self.why_not(self.problem, device, config) or self.of(self.problem, device, config)

    @property
    def panel(self) -> tuple[int, int]:
        """Rows and columns of the blocks that the kernel walks: those of the weight, or of the panels that it is packed into."""
        sparsity = self.problem.sparsity
        assert sparsity is not None
        if self.problem.prepacked:
            return self.config.block_n, self.config.block_k
        return sparsity.block_n, sparsity.block_k

    @property
    def values(self) -> Mapping[str, Any]:
        """The size of the blocks, how many tiles and steps each has, the dtype of the indices, and how the weight lies."""
        (panel_n, panel_k), sparsity = self.panel, self.problem.sparsity
        assert sparsity is not None
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
        """How 8-bit floats become float16, which holds all of them; empty for other dtypes."""
        quantized = self.spec.quantized
        if quantized is None:
            return ""
        text = "%s.to(tl.float16)"
        if quantized.by_bits:
            text = "e4m3_value(%s)" if self.problem.dtype == torch.float8_e4m3fn else "e5m2_value(%s)"
        return text if self.target is not None else f"{text}.to(tl.float32)"

    def expected(self, device: DeviceInfo) -> Expected:
        """Shared memory and, on HIP, the instruction by the predicate of the dense template."""
        predicate, config = Predicate(self.problem, device), self.config.as_multiplied
        multiplies = instruction(predicate, config) if device.type == "hip" else None
        smem_bytes = max(predicate.resources(config).smem_bytes, turned_bytes(self.problem, device, self.config))
        return Expected(instruction=multiplies, smem_bytes=smem_bytes)

    @property
    def packed_format(self) -> str | None:
        """The panels of a prepacked weight."""
        rows = f" {self.config.rows}" if self.config.rows != "neighbours" else ""
        return f"panels {self.config.block_n}x{self.config.block_k}{rows}" if self.problem.prepacked else None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """A sparse_bsr weight in panels."""
        return packed(b, self.config)

    @property
    def record(self) -> Record:
        """The launch for a weight without blocks."""
        return self._record(0)

    def _record(self, nnz: int) -> Record:
        assert isinstance(self.where, BlocksGeometry)
        where = dataclasses.replace(self.where, nnz=nnz)
        arguments, config = self.source.arguments, self.config
        return record_of(arguments, self.problem, where, pdl=config.pdl, blocks=self.blocks, buffers=self.buffers, behind=INDICES)

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind to the problem, anew for each number of blocks that comes along."""
        (kernel,) = loaded
        ready: dict[int, Run] = {}

        def run(out: torch.Tensor, tensors: Tensors, scalars: Scalars) -> None:
            a, weight, *rest = tensors
            values, crow, col = parts(weight)
            nnz = values.shape[0]
            launch = ready.get(nnz)
            if launch is None:
                if len(ready) >= MOST_BOUND:
                    ready.clear()
                launch = ready[nnz] = bind(kernel, self._record(nnz), interpret=self.target is None).run
            if values.data_ptr() % ALIGNED_BYTES or not values.is_contiguous():
                values = values.clone(memory_format=torch.contiguous_format)
            launch(out, (a, values, *rest, crow.contiguous(), col.contiguous()), scalars)

        return Kernel(run=run)
