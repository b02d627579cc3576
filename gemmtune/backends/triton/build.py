"""A Triton kernel as a choice."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ...choice import Claims, Kernel
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from ...problem.operations import QUANTIZED_OPS
from ...toolchain.compiled import Artifact, CompiledChoice
from .arch import ARCHS, arch_of, can_overlap
from .artifact import Expected, artifact, expected_of
from .classes import Source
from .configs import Config, Geometry, geometry
from .kernels import Compilation, Target
from .launch import bind
from .legality import Predicate, check_problem
from .quantized import rounds_weights
from .records import Blocks, Record, record_of
from .source import render_source
from .spec import KernelSpec, specialise
from .workspace import Buffers


@dataclass(frozen=True, kw_only=True)
class KernelsChoice(CompiledChoice):
    """Kernels of ours. With ``from_ptx``, ``load`` takes their PTX on a GPU newer than the one that they are compiled for."""

    from_ptx: bool = field(default=False, repr=False)

    @property
    @abstractmethod
    def kernels(self) -> tuple[Compilation, ...]:
        """The kernels in the order of their launches. All are for one target."""

    @property
    def compile_key(self) -> str | None:
        """Equal for every shape of one alignment class: sizes, strides, group and number of splits are arguments of the launch."""
        target = self.kernels[0].target
        keys = "-then-".join(kernel.key for kernel in self.kernels)
        return None if target is None else f"triton-{keys}-{target.backend}{target.arch}"

    @property
    def compiled(self) -> bool:
        """Was every kernel compiled here before, by the installed version of Triton?"""
        return all(kernel.compiled for kernel in self.kernels)

    @property
    def arch(self) -> str:
        """The target's name."""
        target = self.kernels[0].target
        if target is None:
            raise UnavailableError(f"{self.name} runs in the interpreter: it is compiled for no GPU")
        return target.name

    def forward(self) -> Self:
        """The same choice with ``from_ptx``."""
        return dataclasses.replace(self, from_ptx=True)

    def compile(self) -> None:
        """Fill Triton's artifact cache below our cache folder. Needs no GPU.

        Raises:
            CompileError: Triton or ptxas refused a source.
        """
        for kernel in self.kernels:
            if kernel.target is not None:
                kernel.compile()

    def load(self) -> tuple[Any, ...]:
        """The kernels on the current device, or the functions that the interpreter runs. Raises as ``Compilation.load``."""
        return tuple(kernel.load(from_ptx=self.from_ptx) for kernel in self.kernels)


@dataclass(frozen=True, kw_only=True)
class KernelChoice(KernelsChoice):
    """One kernel that multiplies, of one config, compiled for ``target`` or, where that is None, run by the interpreter on the CPU.

    A family of kernels is a subclass: its template, and what it needs other than the mm template does.
    """

    family: ClassVar[str]
    """The template's name in names of choices and in ``info``."""
    template: ClassVar[str]
    config: Config = field(repr=False)
    where: Geometry = field(repr=False)
    target: Target | None = field(repr=False)

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: Config) -> Self:
        """The choice that runs ``problem`` with ``config``, which must be legal for both."""
        where = cls.divided(problem, device, config)
        claims = cls.claimed(problem, where)
        if arch_of(device).flushes_subnormals and device.type == "hip" and problem.dtype.itemsize <= 2:
            claims = dataclasses.replace(claims, flush_subnormals=True)
        return cls(
            name=f"triton:{cls.label(problem)}_{config}",
            backend="triton",
            problem=problem,
            claims=claims,
            info={
                "template": cls.family,
                "tile": [config.block_m, config.block_n, config.block_k],
                "stages": config.stages,
                "warps": config.warps,
                "group_m": config.group_m,
                "splits": where.splits,
                "pdl": config.pdl,
                "grid": list(where.grid),
                **config.compile_options,
            },
            config=config,
            where=where,
            target=Target.of(device),
        )

    @classmethod
    def why_not(cls, problem: Problem, device: DeviceInfo, config: Config) -> str | None:
        """The family's legality predicate: why ``config`` may not run a problem that ``check_problem`` lets pass, or None."""
        return Predicate(problem, device).check(config)

    def at(self, problem: Problem, device: DeviceInfo) -> Self | str:
        """The config for the problem."""
        reason = check_problem(problem, device) or self.why_not(problem, device, self.config)
        return reason or dataclasses.replace(self.of(problem, device, self.config), from_ptx=self.from_ptx)

    def proved_at(self, problem: Problem, device: DeviceInfo) -> Self:
        """The choice for another problem is proved with the source of this one."""
        made = dataclasses.replace(self, problem=problem, where=self.divided(problem, device, self.config))
        made.__dict__["source"] = self.source
        return made

    @property
    def batch_invariant(self) -> bool:
        """The config alone says how K is divided, and partial sums are added in a fixed order."""
        return self.claims.deterministic

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
            splits=where.splits,
            weights=rounds_weights(problem),
            input_mode=problem.precision.input_mode,
        )

    @property
    def spec(self) -> KernelSpec:
        """What the source depends on."""
        capability = int(self.target.arch) if self.target is not None and self.target.backend == "cuda" else 0
        spec = specialise(
            self.problem, self.config, interpret=self.target is None, dependent=can_overlap(capability), capability=capability
        )
        # What may be rounded to tf32 need not be.
        exact = self.target is not None and self.target.name in ARCHS and not ARCHS[self.target.name].tf32
        return dataclasses.replace(spec, input_precision="ieee") if exact else spec

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

    @functools.cached_property
    def kernels(self) -> tuple[Compilation, ...]:
        """The one kernel."""
        stages, warps = self.config.stages, self.config.warps
        told = tuple(self.config.compile_options.items())
        return (Compilation(name=self.name, source=self.source, stages=stages, warps=warps, target=self.target, options=told),)

    def expected(self, device: DeviceInfo) -> Expected:
        """What legality predicts of the compiled kernel."""
        return expected_of(Predicate(self.problem, device), self.config)

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The one kernel."""
        return (artifact(self.kernels[0].compile(), self.expected(device)),)

    @functools.cached_property
    def content_hash(self) -> str:
        """Over the rendered source, its signature and the config; not over the versions of Triton, torch and driver."""
        programs = "" if self.where.programs is None else f" {self.where.programs}"
        return hashlib.sha256(f"{self.kernels[0].key} {self.config}{programs}".encode()).hexdigest()

    def launch_variants(self) -> Sequence[Self]:
        """The same kernel with the other answer to whether its launch may overlap the kernel before it."""
        if not self.spec.dependent:
            return ()
        config = dataclasses.replace(self.config, pdl=not self.config.pdl)
        name = self.name.replace(str(self.config), str(config))
        return (dataclasses.replace(self, name=name, info={**self.info, "pdl": config.pdl}, config=config),)

    @property
    def record(self) -> Record:
        """The launch, as plain data."""
        arguments, pdl = self.source.arguments, self.config.pdl
        return record_of(arguments, self.problem, self.where, pdl=pdl, blocks=self.blocks, buffers=self.buffers)

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind to the problem. On a GPU to the current device, which must be the current device at each call."""
        (kernel,) = loaded
        return bind(kernel, self.record, interpret=self.target is None)


@dataclass(frozen=True, kw_only=True)
class TritonChoice(KernelChoice):
    """The mm template with one config."""

    family = "mm"
    template = "mm.py.jinja"

    @classmethod
    def label(cls, problem: Problem) -> str:
        """The operation, of the dense ones mm or bmm."""
        return problem.op if problem.op in QUANTIZED_OPS else "bmm" if problem.batched else "mm"

    @property
    def legal_between(self) -> bool:
        """M may be too small for the tile, or too large."""
        return True
