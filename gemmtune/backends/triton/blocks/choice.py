"""Kernel of block-sparse products as a choice, with the indices of its launch."""

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
from .configs import AXES, BlocksConfig, transpose_bytes, why_not_blocks, why_not_config
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
    def axes(self) -> Mapping[str, Sequence[int]]:
        return {} if self.target is None else AXES

    @property
    def parameters(self) -> Mapping[str, int]:
        return {name: getattr(self.config, name) for name in self.axes}

    def moved(self, parameters: Mapping[str, int], device: DeviceInfo) -> Choice | str:
        changes: dict[str, Any] = dict(parameters)
        config = dataclasses.replace(self.config, **changes)
        return self.why_not(self.problem, device, config) or self.of(self.problem, device, config)

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
