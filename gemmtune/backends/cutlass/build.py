"""CUTLASS operation as a choice."""

import dataclasses
import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from ...choice import Claims, Kernel
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...numerics.bounds import PROMOTED_EVERY
from ...numerics.reduction import Reduction, reduction_of
from ...problem import Problem
from ...toolchain.compiled import Artifact, FileChoice
from ...toolchain.made_once import compile_text, made_once
from ...toolchain.nvcc import find_compiler
from ...toolchain.orientation import Oriented, orient
from .configs import Config, Legality, check_problem
from .launch import Library, bind, load
from .source import Source, flags
from .toolkit import Toolkit
from .variants import Grid, Variant, legal_variants, most_splits, neighbours

NAME = "cutlass"


def artifact_file(source: Source, toolkit: Toolkit, capability: int) -> tuple[str, ...]:
    """Return the shared object's place in the cache. The compiler is not in its name: another machine's build is used unchanged."""
    parts = (source.digest, toolkit.version, *flags(source.operation, capability))
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
    return NAME, f"{digest}.so"


def compile_source(source: Source, toolkit: Toolkit, capability: int, name: str) -> Path:
    """Compile ``source`` to a shared object if it is missing. If several processes need it, one compiles.

    Raises CompileError if nvcc refuses or nothing can be written, UnavailableError if there is no nvcc.
    """

    def make(made: Path) -> None:
        command = [find_compiler().path, *flags(source.operation, capability), *(f"-I{include}" for include in toolkit.include)]
        compile_text(command, source.text, ".cu", made, name)

    return made_once(artifact_file(source, toolkit, capability), make, name)


def name_of(config: Config) -> str:
    return f"{NAME}:{config.name}"


def reduction_for(problem: Problem, config: Config) -> Reduction | None:
    """Return one run over K, or None if CUTLASS's scheduler divides K."""
    operation = config.operation
    if operation.stream_k and config.variant.decomposition != "dataparallel":
        return None
    unit = "fma" if operation.opcode == "Simt" or operation.a == "f64" else "matrix"
    own = f"cutlass {operation.kernel_schedule}".strip() if problem.float8 or operation.converts else ""
    return reduction_of(problem, "cutlass", unit=unit, promoted_every=PROMOTED_EVERY if operation.promotes else None, own=own)


@dataclass(frozen=True, kw_only=True)
class CutlassChoice(FileChoice):
    """One operation with one launch variant, compiled for ``capability`` with the CUTLASS copy ``toolkit``."""

    config: Config = field(repr=False)
    toolkit: Toolkit = field(repr=False)
    capability: int = field(repr=False)
    swap_ab: bool = field(repr=False)
    multiprocessors: int = field(repr=False)
    compiler = staticmethod(find_compiler)

    @classmethod
    def of(cls, config: Config, problem: Problem, device: DeviceInfo, toolkit: Toolkit, *, swap_ab: bool) -> Self:
        operation, accumulator = config.operation, problem.accumulator
        grid = Grid.of(operation, orient(problem, swap_ab=swap_ab), problem.batch, device.sm_count)
        return cls(
            name=name_of(config),
            backend=NAME,
            problem=problem,
            claims=Claims(
                accumulate=accumulator,
                epilogue_input=problem.epilogue_dtype if problem.epilogue else accumulator,
                splits=most_splits(config.variant, operation, grid),
                input_mode="tf32" if operation.a == "tf32" and problem.dtype == torch.float32 else "ieee",
                reduction=reduction_for(problem, config),
            ),
            info=_info(config, swap_ab=swap_ab),
            config=config,
            toolkit=toolkit,
            capability=operation.introduced if operation.modern else device.capability,
            swap_ab=swap_ab,
            multiprocessors=device.sm_count,
        )

    def at(self, problem: Problem, device: DeviceInfo) -> "CutlassChoice | str":
        """Return the operation for another problem with the same division of K. Any order of tiles stays legal."""
        operation, variant = self.config.operation, self.config.variant
        oriented = check_problem(problem, device) or Legality(problem, device).orientation(operation)
        if isinstance(oriented, str):
            return oriented
        grid = Grid.of(operation, oriented, problem.batch, device.sm_count)
        divided = {(x.decomposition, x.splits) for x in legal_variants(operation, grid)}
        if (variant.decomposition, variant.splits) not in divided:
            return f"{self.name}: K of {grid.steps} steps and {grid.tiles} tiles cannot be divided like that"
        return self.of(self.config, problem, device, self.toolkit, swap_ab=oriented.swap_ab)

    @property
    def batch_invariant(self) -> bool:
        """True unless the number of tiles decides how K is divided."""
        return self.config.variant.decomposition in ("dataparallel", "splitk") or not self.config.operation.stream_k

    def launch_variants(self) -> "tuple[CutlassChoice, ...]":
        operation = self.config.operation
        grid = Grid.of(operation, self._oriented, self.problem.batch, self.multiprocessors)
        return tuple(self._with(variant, grid) for variant in neighbours(self.config.variant, legal_variants(operation, grid)))

    def _with(self, variant: Variant, grid: Grid) -> "CutlassChoice":
        config = dataclasses.replace(self.config, variant=variant)
        splits, reduction = most_splits(variant, config.operation, grid), reduction_for(self.problem, config)
        claims = dataclasses.replace(self.claims, splits=splits, reduction=reduction)
        info = _info(config, swap_ab=self.swap_ab)
        return dataclasses.replace(self, name=name_of(config), config=config, claims=claims, info=info)

    @property
    def _oriented(self) -> Oriented:
        return orient(self.problem, swap_ab=self.swap_ab)

    @functools.cached_property
    def source(self) -> Source:
        problem, inp = self.problem, self.problem.inp_read
        extra = problem.epilogue.operands if problem.epilogue else ()
        return Source(
            operation=self.config.operation,
            alpha=problem.alpha,
            beta=problem.beta if inp is not None else "zero",
            added=inp is not None,
            epilogue=problem.epilogue,
            scales=len(problem.scales),
            operands=tuple(x.dtype for x in (*((inp,) if inp is not None else ()), *problem.scales, *extra)),
        )

    @property
    def content_hash(self) -> str:
        return hashlib.blake2b(
            f"{self.source.digest} {self.toolkit.version} {self.config.variant}".encode(), digest_size=16
        ).hexdigest()

    @property
    def compile_key(self) -> str:
        return f"cutlass-{self.source.digest}-{self.toolkit.version}-{self.capability}"

    @property
    def file(self) -> tuple[str, ...]:
        return artifact_file(self.source, self.toolkit, self.capability)

    def make(self) -> Path:
        return compile_source(self.source, self.toolkit, self.capability, self.name)

    def load(self) -> Library:
        return self.opened(load)

    def bind(self, loaded: Library) -> Kernel:
        """Return the launch for the problem on the current device. Raises ErrorFromChoice: the operation refuses the problem."""
        return bind(loaded, self.config, self.problem, self._oriented, self.name)

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:  # noqa: ARG002 - enumeration checks the device's limits
        path, library = self.opened(lambda path: (path, load(path)))
        kernel, expected = self.config.operation.name, self.config.operation.sass
        threads, shared_bytes = library.threads, library.shared_bytes
        return (self.artifact(path, kernel=kernel, threads=threads, shared_bytes=shared_bytes, expected=expected),)

    @property
    def arch(self) -> str:
        return f"sm{self.capability}"

    def forward(self) -> "CutlassChoice":
        """Return this choice: a 2.x operation contains PTX. Raises UnavailableError for the single architecture of a 3.x one."""
        if self.config.operation.modern:
            raise UnavailableError(
                f"{self.name}: got a newer GPU, expected {self.arch}: the kernel uses instructions that only it has"
            )
        return self


def _info(config: Config, *, swap_ab: bool) -> dict[str, Any]:
    operation, variant = config.operation, config.variant
    info: dict[str, Any] = {"tile": list(operation.tile)}
    if operation.modern:
        # CUTLASS's names without namespaces. The number of stages is unknown here: CUTLASS decides it at compile time.
        schedules = (operation.kernel_schedule, operation.epilogue_schedule, operation.scheduler)
        names = [name.rsplit("::", 1)[-1] for name in schedules]
        info |= {"cluster": list(operation.cluster)} | dict(zip(("schedule", "epilogue_schedule", "scheduler"), names, strict=True))
    else:
        info |= {"stages": operation.stages, "warps": list(operation.warps)}
    divided = {"decomposition": variant.decomposition, "splits": variant.splits} if operation.stream_k else {}
    return info | {"raster": variant.raster, "swizzle": variant.swizzle, **divided, "swap_ab": swap_ab}
