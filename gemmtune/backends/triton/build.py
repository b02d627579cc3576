"""A Triton kernel as a choice."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from ...choice import Claims, Kernel
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from ...problem.operations import QUANTIZED_OPS
from ...toolchain.compiled import Artifact, CompiledChoice
from .arch import can_overlap
from .artifact import Expected, artifact, expected_of
from .configs import Config
from .geometry import Geometry, geometry
from .kernels import Target, compile_kernel, initialise, kernel_key, load_function, marker, use_ptx
from .launch import Blocks, bind
from .legality import Predicate
from .quantized import rounds_weights
from .source import Source, render_source
from .spec import KernelSpec, specialise
from .workspace import Buffers

__all__ = ["KernelChoice", "TritonChoice", "capability_of", "target_of"]


@dataclass(frozen=True, kw_only=True)
class KernelChoice(CompiledChoice):
    """One kernel that multiplies, of one config, compiled for ``target`` or, where that is None, run by the interpreter on the CPU.

    A family of kernels is a subclass: its template, and what it needs other than the mm template does. With ``from_ptx``, ``load``
    takes the kernel's PTX on a GPU newer than ``target``.
    """

    family: ClassVar[str]
    """The template's name in names of choices and in ``info``."""
    template: ClassVar[str]
    config: Config = field(repr=False)
    where: Geometry = field(repr=False)
    target: Target | None = field(repr=False)
    from_ptx: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: Config) -> Self:
        """The choice that runs ``problem`` with ``config``, which must be legal for both."""
        where = cls.divided(problem, device, config)
        return cls(
            name=f"triton:{cls.label(problem)}_{config}",
            backend="triton",
            problem=problem,
            claims=cls.claimed(problem, where),
            info={
                "template": cls.family,
                "tile": [config.block_m, config.block_n, config.block_k],
                "stages": config.stages,
                "warps": config.warps,
                "group_m": config.group_m,
                "splits": where.splits,
                "pdl": config.pdl,
                "grid": list(where.grid),
            },
            config=config,
            where=where,
            target=target_of(device),
        )

    @classmethod
    def label(cls, problem: Problem) -> str:  # noqa: ARG003 - the names of some families have the operation in them
        """What the name of a choice begins with."""
        return cls.family

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:  # noqa: ARG003 - some ask the device
        """How the work is divided among programs."""
        return geometry(problem, config)

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """The arithmetic of the kernel."""
        return Claims(
            accumulate=problem.accumulator,
            partials=problem.accumulator,
            epilogue_input=problem.accumulator,
            splits=where.splits,
            weights=rounds_weights(problem),
            input_mode=problem.precision.input_mode,
        )

    @property
    def spec(self) -> KernelSpec:
        """What the source depends on."""
        capability = capability_of(self.target)
        return specialise(
            self.problem,
            self.config,
            interpret=self.target is None,
            dependent=can_overlap(capability),
            capability=capability,
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """What the template asks for beside the values of every template."""
        return {}

    @property
    def preamble(self) -> str:
        """Source text that comes before the kernel."""
        return ""

    @property
    def blocks(self) -> Blocks:
        """The operands that the kernel has as descriptors, with the lines, and elements of a line, that are moved at a time."""
        return {}

    @property
    def buffers(self) -> Buffers:
        """What the kernel needs beside its operands."""
        elements = self.config.block_m * self.config.block_n * self.where.slots
        return Buffers(dtype=self.problem.accumulator, partials=elements, counters=self.where.counters)

    @functools.cached_property
    def source(self) -> Source:
        """The rendered kernel."""
        values, blocks = tuple(self.values.items()), tuple(self.blocks.items())
        return render_source(self.spec, self.template, values=values, preamble=self.preamble, described=blocks)

    @abstractmethod
    def expected(self, device: DeviceInfo) -> Expected:
        """What legality predicts of the compiled kernel."""

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The one kernel."""
        return (artifact(self.kernel(), self.expected(device)),)

    @functools.cached_property
    def _kernel_key(self) -> str:
        return kernel_key(self.source, self.config.stages, self.config.warps)

    @functools.cached_property
    def _content_hash(self) -> str:
        programs = "" if self.where.programs is None else f" {self.where.programs}"
        return hashlib.sha256(f"{self._kernel_key} {self.config}{programs}".encode()).hexdigest()

    @property
    def content_hash(self) -> str:
        """Over the rendered source, its signature and the config; not over the versions of Triton, torch and driver."""
        return self._content_hash

    @property
    def compile_key(self) -> str | None:
        """Equal for every shape of one alignment class: sizes, strides, group and number of splits are arguments of the launch."""
        return None if self.target is None else f"triton-{self._kernel_key}-{self.target.backend}{self.target.arch}"

    @property
    def compiled(self) -> bool:
        """Was this kernel compiled here before, by the installed version of Triton?"""
        return self.target is None or marker(self._kernel_key, self.target).exists()

    @property
    def arch(self) -> str:
        """The target's name."""
        if self.target is None:
            raise UnavailableError(f"{self.name} runs in the interpreter: it is compiled for no GPU")
        return self.target.name

    def launch_variants(self) -> Sequence[Self]:
        """The same kernel with the other answer to whether its launch may overlap the kernel before it."""
        if not self.spec.dependent:
            return ()
        config = dataclasses.replace(self.config, pdl=not self.config.pdl)
        name = self.name.replace(str(self.config), str(config))
        return (dataclasses.replace(self, name=name, info={**self.info, "pdl": config.pdl}, config=config),)

    def forward(self) -> Self:
        """The same choice with ``from_ptx``."""
        return dataclasses.replace(self, from_ptx=True)

    def kernel(self) -> Any:
        """Triton's compiled kernel, for its code and metadata: compiled if it is not yet, and not loaded on any device.

        Raises:
            UnavailableError: the choice runs in the interpreter, which compiles nothing.
        """
        if self.target is None:
            raise UnavailableError(f"{self.name} runs in the interpreter: there is no compiled kernel")
        return self._compile(self.target)

    def compile(self) -> None:
        """Fill Triton's artifact cache below our cache folder. Needs no GPU.

        Raises:
            CompileError: Triton or ptxas refused the source.
        """
        if self.target is not None:
            self._compile(self.target)

    def _compile(self, target: Target) -> Any:
        return compile_kernel(self.name, self.source, self._kernel_key, target, stages=self.config.stages, warps=self.config.warps)

    def bind(self, loaded: Any) -> Kernel:
        """Bind to the problem. On a GPU to the current device, which must be the current device at each call."""
        run = bind(
            loaded,
            self.source.arguments,
            self.problem,
            self.where,
            blocks=self.blocks,
            buffers=self.buffers,
            interpret=self.target is None,
            pdl=self.config.pdl,
        )
        return Kernel(run=run)

    def load(self) -> Any:
        """Triton's compiled kernel on the current device, or the function that the interpreter runs.

        Raises:
            CompileError: it was not compiled yet, and the compiler refused it.
            UnavailableError: ``from_ptx``, and the PTX is for its architecture alone.
        """
        if self.target is None:
            return load_function(self.source)
        key = (self._kernel_key, self.target, self.from_ptx, torch.cuda.current_device())
        compiled = _loaded.get(key)
        if compiled is None:
            compiled = self._compile(self.target)
            if self.from_ptx:
                use_ptx(compiled)
            initialise(compiled)
            _loaded[key] = compiled
        return compiled


@dataclass(frozen=True, kw_only=True)
class TritonChoice(KernelChoice):
    """The mm template with one config."""

    family = "mm"
    template = "mm.py.jinja"

    @classmethod
    def label(cls, problem: Problem) -> str:
        """The operation, of the dense ones mm or bmm."""
        return problem.op if problem.op in QUANTIZED_OPS else "bmm" if problem.batched else "mm"

    def expected(self, device: DeviceInfo) -> Expected:
        """What the predicate says."""
        return expected_of(Predicate(self.problem, device), self.config)


_loaded: dict[tuple[str, Target, bool, int], Any] = {}
"""Kernels of this process by key, target, whether they come from PTX, and device index: problems of one class share them."""


def target_of(device: DeviceInfo) -> Target | None:
    """What to compile for on ``device``; None for a CPU, where only the interpreter runs Triton."""
    if device.type == "cpu":
        return None
    if device.type == "hip":
        return Target(backend="hip", arch=device.arch, warp_size=device.warp_size)
    return Target(backend="cuda", arch=device.capability, warp_size=device.warp_size)


def capability_of(target: Target | None) -> int:
    """The compute capability that is compiled for; 0 for another maker's GPU, and for the interpreter."""
    return int(target.arch) if target is not None and target.backend == "cuda" else 0
