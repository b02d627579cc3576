"""A Triton kernel as a choice."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ...choice import Claims, Kernel
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from ...problem.operations import QUANTIZED_OPS
from ...toolchain.compiled import Artifact, CompiledChoice
from .arch import can_overlap
from .artifact import mm_artifact
from .configs import Config
from .geometry import Geometry, geometry
from .kernels import Target, compile_kernel, initialise, kernel_key, load_function, marker, use_ptx
from .launch import bind_compiled, bind_interpreted
from .legality import Predicate
from .quantized import rounds_weights
from .source import Source, render_source
from .spec import KernelSpec, specialise

__all__ = ["KernelChoice", "TritonChoice", "choice_for", "target_of", "tiled"]


@dataclass(frozen=True, kw_only=True)
class KernelChoice(CompiledChoice):
    """One kernel that multiplies, of one config, compiled for ``target`` or, where that is None, run by the interpreter on the CPU.

    With ``from_ptx``, ``build`` loads the kernel's PTX on a GPU newer than ``target``.
    """

    config: Config = field(repr=False)
    target: Target | None = field(repr=False)
    from_ptx: bool = field(default=False, repr=False)

    @functools.cached_property
    @abstractmethod
    def source(self) -> Source:
        """The rendered kernel."""

    @property
    def spec(self) -> KernelSpec:
        """What the source depends on."""
        capability = int(self.target.arch) if self.target is not None and self.target.backend == "cuda" else 0
        return specialise(
            self.problem,
            self.config,
            interpret=self.target is None,
            dependent=can_overlap(capability),
            capability=capability,
        )

    @functools.cached_property
    def _kernel_key(self) -> str:
        return kernel_key(self.source, self.config.stages, self.config.warps)

    @functools.cached_property
    def _content_hash(self) -> str:
        return hashlib.sha256(f"{self._kernel_key} {self.config}".encode()).hexdigest()

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
        where = geometry(self.problem, self.config)
        bind = bind_interpreted if self.target is None else bind_compiled
        return Kernel(run=bind(loaded, self.source.arguments, self.problem, where, self.config))

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

    @functools.cached_property
    def source(self) -> Source:
        """The rendered kernel."""
        return render_source(self.spec)

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The mm kernel."""
        return (mm_artifact(self.kernel(), Predicate(self.problem, device), self.config),)


_loaded: dict[tuple[str, Target, bool, int], Any] = {}
"""Kernels of this process by key, target, whether they come from PTX, and device index: problems of one class share them."""


def target_of(device: DeviceInfo) -> Target | None:
    """What to compile for on ``device``; None for a CPU, where only the interpreter runs Triton."""
    if device.type == "cpu":
        return None
    if device.type == "hip":
        return Target(backend="hip", arch=device.arch, warp_size=device.warp_size)
    return Target(backend="cuda", arch=device.capability, warp_size=device.warp_size)


def tiled(problem: Problem, device: DeviceInfo, config: Config, where: Geometry, template: str, label: str = "") -> dict[str, Any]:
    """What a choice whose programs have tiles says of itself, as arguments for its class.

    ``label`` is in its name, or else ``template``.
    """
    return {
        "name": f"triton:{label or template}_{config}",
        "backend": "triton",
        "problem": problem,
        "claims": Claims(
            accumulate=problem.accumulator,
            partials=problem.accumulator,
            epilogue_input=problem.accumulator,
            splits=where.splits,
            weights=rounds_weights(problem),
            input_mode=problem.precision.input_mode,
        ),
        "info": {
            "template": template,
            "tile": [config.block_m, config.block_n, config.block_k],
            "stages": config.stages,
            "warps": config.warps,
            "group_m": config.group_m,
            "splits": where.splits,
            "pdl": config.pdl,
            "grid": list(where.grid),
        },
        "config": config,
        "target": target_of(device),
    }


def choice_for(problem: Problem, device: DeviceInfo, config: Config) -> TritonChoice:
    """The choice that runs ``problem`` with ``config``, which must be legal for both."""
    label = problem.op if problem.op in QUANTIZED_OPS else "bmm" if problem.batched else "mm"
    return TritonChoice(**tiled(problem, device, config, geometry(problem, config), "mm", label))
