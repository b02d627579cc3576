"""Bases of choices that run Triton kernels of ours."""

import dataclasses
import functools
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ...cache import why_nothing_new
from ...choice import Claims, Kernel
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...numerics.reduction import Reduction
from ...problem import Problem
from ...toolchain.compiled import Artifact, CompiledChoice
from ...toolchain.triton_kernels import Compilation, Source, Target, compile_all
from .arch import ARCHS, arch_of, can_overlap
from .artifact import Expected, artifact, expected_of
from .configs import Config, Geometry, geometry
from .launch import bind
from .legality import Predicate, check_problem
from .quantized import rounds_weights
from .records import Blocks, Record, record_of
from .source import render_source
from .spec import KernelSpec, specialise
from .workspace import Buffers


@dataclass(frozen=True, kw_only=True)
class KernelsChoice(CompiledChoice):
    """Base of choices that run our own Triton kernels. ``from_ptx``: load the PTX, on a GPU newer than the target."""

    from_ptx: bool = field(default=False, repr=False)

    @property
    @abstractmethod
    def kernels(self) -> tuple[Compilation, ...]:
        """Kernels in launch order, all for one target."""

    @property
    def compile_key(self) -> str | None:
        """Cache key, equal for a whole alignment class: sizes, strides, group size and splits are arguments of the launch."""
        target = self.kernels[0].target
        keys = "-then-".join(kernel.key for kernel in self.kernels)
        return None if target is None else f"triton-{keys}-{target.backend}{target.arch}"

    @property
    def compiled(self) -> bool:
        return all(kernel.compiled for kernel in self.kernels)

    @property
    def obstacle(self) -> str | None:
        reason = why_nothing_new("triton")  # first: to know that a kernel is compiled takes its source
        return None if reason is None or self.compiled else reason

    @property
    def arch(self) -> str:
        target = self.kernels[0].target
        if target is None:
            raise UnavailableError(f"{self.name} runs in the interpreter: it is compiled for no GPU")
        return target.name

    def forward(self) -> Self:
        return dataclasses.replace(self, from_ptx=True)

    def compile(self) -> None:
        """Fill Triton's artifact cache below our cache folder, without a GPU. Raises CompileError if a source is refused."""
        compile_all(self.kernels)

    def compilation(self) -> Callable[[], object]:
        return functools.partial(compile_all, self.kernels)

    def load(self) -> tuple[Any, ...]:
        return tuple(kernel.load(from_ptx=self.from_ptx) for kernel in self.kernels)


@dataclass(frozen=True, kw_only=True)
class KernelChoice(KernelsChoice):
    """One multiplying kernel with one config. Families are subclasses. The interpreter runs it if ``target`` is None."""

    family: ClassVar[str]
    """Name of the template in choice names and in ``info``."""
    template: ClassVar[str]
    predicate: ClassVar[type[Predicate]] = Predicate
    config: Config = field(repr=False)
    where: Geometry = field(repr=False)
    target: Target | None = field(repr=False)

    @classmethod
    def of(cls, problem: Problem, device: DeviceInfo, config: Config) -> Self:
        """Return the choice that runs ``problem`` with ``config``, which must be legal for both problem and device."""
        where = cls.divided(problem, device, config)
        claims = cls.claimed(problem, where)
        if arch_of(device).flushes_subnormals and device.type == "hip" and problem.dtype.itemsize <= 2:
            claims = dataclasses.replace(claims, flush_subnormals=True)
        claims = dataclasses.replace(claims, reduction=cls.reduced(problem, where, config, device))
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
        """Return why ``config`` may not run a problem that ``check_problem`` accepts, or None: the family's legality predicate."""
        return cls.predicate(problem, device).check(config)

    def at(self, problem: Problem, device: DeviceInfo) -> Self | str:
        reason = check_problem(problem, device) or self.why_not(problem, device, self.config)
        return reason or dataclasses.replace(self.of(problem, device, self.config), from_ptx=self.from_ptx)

    def proved_at(self, problem: Problem, device: DeviceInfo) -> Self:
        made = dataclasses.replace(self, problem=problem, where=self.divided(problem, device, self.config))
        made.__dict__["source"] = self.source
        return made

    @property
    def batch_invariant(self) -> bool:
        """True if results do not depend on the batch: the config alone divides K, and partial sums have a fixed order."""
        return self.claims.deterministic

    @classmethod
    def label(cls, problem: Problem) -> str:  # noqa: ARG003 - some families name the operation
        """Return the start of a choice's name."""
        return cls.family

    @classmethod
    def divided(cls, problem: Problem, device: DeviceInfo, config: Config) -> Geometry:  # noqa: ARG003 - some families need the device
        """Return how the work is divided among programs."""
        return geometry(problem, config)

    @classmethod
    def claimed(cls, problem: Problem, where: Geometry) -> Claims:
        """Return the claims about the kernel's arithmetic."""
        return Claims(
            accumulate=problem.accumulator,
            splits=where.splits,
            weights=rounds_weights(problem),
            input_mode=problem.precision.input_mode,
        )

    @classmethod
    def reduced(cls, problem: Problem, where: Geometry, config: Config, device: DeviceInfo) -> Reduction | None:  # noqa: ARG003
        """Return how the kernel sums K, a function of config and K. None: the family does not say."""
        return None

    @property
    def spec(self) -> KernelSpec:
        capability = int(self.target.arch) if self.target is not None and self.target.backend == "cuda" else 0
        spec = specialise(
            self.problem, self.config, interpret=self.target is None, dependent=can_overlap(capability), capability=capability
        )
        # If the hardware lacks tf32, "tf32" means IEEE float32, which is more exact.
        exact = self.target is not None and self.target.name in ARCHS and not ARCHS[self.target.name].tf32
        return dataclasses.replace(spec, input_precision="ieee") if exact else spec

    @property
    def values(self) -> Mapping[str, Any]:
        """Additional values for the template."""
        return {}

    @property
    def preamble(self) -> str:
        """Source text before the kernel."""
        return ""

    @property
    def blocks(self) -> Blocks:
        """Descriptor operands, each with the lines and elements per line that one copy moves."""
        return {}

    @property
    def buffers(self) -> Buffers:
        """Memory that the kernel needs in addition to its operands."""
        elements = self.config.block_m * self.config.block_n * self.where.slots
        return Buffers(dtype=self.problem.accumulator, partials=elements, counters=self.where.counters)

    @functools.cached_property
    def source(self) -> Source:
        values, blocks = tuple(self.values.items()), tuple(self.blocks.items())
        return render_source(self.spec, self.template, values=values, preamble=self.preamble, described=blocks)

    @functools.cached_property
    def kernels(self) -> tuple[Compilation, ...]:
        stages, warps = self.config.stages, self.config.warps
        options = tuple(self.config.compile_options.items())
        return (Compilation(name=self.name, source=self.source, stages=stages, warps=warps, target=self.target, options=options),)

    def expected(self, device: DeviceInfo) -> Expected:
        """Return what legality predicts of the compiled kernel."""
        return expected_of(self.predicate(self.problem, device), self.config)

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        return (artifact(self.kernels[0].compile(), self.expected(device)),)

    @functools.cached_property
    def content_hash(self) -> str:
        """Hash of the rendered source, its signature and the config, independent of the versions of Triton, torch and driver."""
        programs = "" if self.where.programs is None else f" {self.where.programs}"
        return hashlib.sha256(f"{self.kernels[0].key} {self.config}{programs}".encode()).hexdigest()

    def launch_variants(self) -> Sequence[Self]:
        if not self.spec.dependent:
            return ()
        config = dataclasses.replace(self.config, pdl=not self.config.pdl)
        name = self.name.replace(str(self.config), str(config))
        return (dataclasses.replace(self, name=name, info={**self.info, "pdl": config.pdl}, config=config),)

    @property
    def record(self) -> Record:
        arguments, pdl = self.source.arguments, self.config.pdl
        return record_of(arguments, self.problem, self.where, pdl=pdl, blocks=self.blocks, buffers=self.buffers)

    def bind(self, loaded: tuple[Any, ...]) -> Kernel:
        """Bind to the problem. On a GPU this binds to the current device, which must stay current at each call."""
        (kernel,) = loaded
        return bind(kernel, self.record, interpret=self.target is None)
