"""Choice for the kernel of one family with one config."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...choice import Kernel, Offers, Refusal
from ...device import DeviceInfo
from ...effort import EFFORT
from ...errors import ErrorFromChoice, UnavailableError
from ...problem import Problem
from ...settings import Settings
from ...toolchain.compiled import Artifact, FileChoice
from ...toolchain.cubin import compile_cubin, find_cubin_compiler, make_cubin
from ...toolchain.driver import LoadedKernel, find_driver
from ...toolchain.launcher import Launcher, bind, loaded_kernel, prepared, workspace_of
from ...toolchain.record import Record
from .family import Family
from .hopper import ARCH, CAPABILITY
from .kernel import KernelSource

NAME = "cuda"


@dataclass(frozen=True, kw_only=True)
class CudaChoice(FileChoice):
    """Kernel of ``family`` with one ``config``, for ``device``. The choice's name spells out the whole config."""

    family: Family[Any] = field(repr=False, compare=False)
    config: Any = field(repr=False)
    device: DeviceInfo = field(repr=False)
    compiler = staticmethod(find_cubin_compiler)

    @classmethod
    def of(cls, family: Family[Any], config: Any, problem: Problem, device: DeviceInfo) -> CudaChoice:
        """Build the choice of ``config``, which must be legal for the problem and the device."""
        return cls(
            name=f"{NAME}:{family.name}_{family.label(problem, config)}",
            backend=NAME,
            problem=problem,
            claims=dataclasses.replace(family.claims(problem, config), reduction=family.reduction(problem, config)),
            info=family.info(problem, config),
            family=family,
            config=config,
            device=device,
        )

    def at(self, problem: Problem, device: DeviceInfo) -> CudaChoice | str:
        reason = self.family.why_not(problem, device) or self.family.why_not_config(problem, device, self.config)
        if reason is not None:
            return reason
        made = self.of(self.family, self.config, problem, device)
        made.__dict__["source"] = self.source  # sizes do not change it
        return made

    def proved_at(self, problem: Problem, device: DeviceInfo) -> CudaChoice:  # noqa: ARG002 - the device stays the same
        return dataclasses.replace(self, problem=problem)

    @property
    def estimate_us(self) -> float:
        return self.family.estimate_us(self.problem, self.device, self.config)

    @property
    def legal_between(self) -> bool:
        return self.family.legal_between

    @property
    def one_kernel(self) -> bool:
        return True

    @property
    def packed_format(self) -> str | None:
        return self.family.packed_format(self.problem, self.config)

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return self.family.pack(b) if self.packed_format else b

    @property
    def batch_invariant(self) -> bool:
        return self.family.batch_invariant(self.problem, self.config)

    def launch_variants(self) -> tuple[CudaChoice, ...]:
        family, problem, device = self.family, self.problem, self.device
        near = family.launch_variants(problem, device, self.config)
        legal = (config for config in near if family.why_not_config(problem, device, config) is None)
        return tuple(self.of(family, config, problem, device) for config in legal)

    @functools.cached_property
    def source(self) -> KernelSource:
        return self.family.source(self.problem, self.config)

    @functools.cached_property
    def record(self) -> Record:
        return self.family.record(self.problem, self.config)

    @property
    def file(self) -> tuple[str, ...]:
        return NAME, f"{self.source.digest}.cubin"

    def make(self) -> Path:
        return make_cubin(self.file, lambda: self.source.text, ARCH, self.name)

    def compilation(self) -> Callable[[], object]:
        return functools.partial(compile_cubin, find_cubin_compiler(), self.file, self.source.text, ARCH, self.name)

    def load(self) -> Mapping[str, LoadedKernel]:
        """Load the source's kernels on the current device, by name. Raises as ``opened``, or UnavailableError from the driver."""
        driver, device, names = find_driver(), torch.cuda.current_device(), self.source.kernels
        return self.opened(lambda path: {name: loaded_kernel(driver, path, name, device) for name in names})

    def bind(self, loaded: Mapping[str, LoadedKernel]) -> Kernel:
        """Return the launches for the problem. Raises ErrorFromChoice: the device cannot run them."""
        *before, last = (Launcher(loaded[record.kernel], record, self._refuse) for record in (*self.record.before, self.record))
        workspace, several = workspace_of(last), self.record.scratch_bytes > 0 or len(before) > 0
        run = bind(last, self.problem, self.name, workspace, before)
        return Kernel(run=run, prepared=None if several else prepared(last, self.problem, workspace))

    def _refuse(self, reason: str) -> ErrorFromChoice:
        return ErrorFromChoice(self.name, str(self.problem), reason)

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:  # noqa: ARG002 - enumeration checks the device's limits
        """Return the main kernel's artifact. Compilation checks its shared memory and threads."""
        record = self.record
        artifact = self.artifact(
            self.opened(lambda path: path),
            kernel=record.kernel,
            threads=record.threads,
            shared_bytes=record.shared_bytes,
            expected=self.family.instruction[self.problem.dtype],
            predicted_bytes=record.shared_bytes,
        )
        return (artifact,)

    @property
    def arch(self) -> str:
        return f"sm{CAPABILITY}"

    def forward(self) -> CudaChoice:
        """Raise UnavailableError: the kernels use instructions of a single architecture."""
        raise UnavailableError(f"{self.name}: got a newer GPU, expected {self.arch}: the kernel uses instructions that only it has")


def offers(family: Family[Any], problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    """Return the family's likeliest legal configs, and the refused ones counted by reason. Needs neither a compiler nor a GPU."""
    name = f"{NAME}:{family.name}"
    reason = family.why_not(problem, device) or family.why_not_likely(problem, device, settings.search)
    if reason is not None:
        return Offers(refusals=(Refusal(name=name, reason=reason),))
    found = (family.why_not_config(problem, device, config) or config for config in family.candidates(problem, device))
    legal, refusals = Refusal.apart(found, name, "configs")
    tried = family.likeliest(problem, device, legal, EFFORT[settings.search].configs[name])
    return Offers(choices=tuple(CudaChoice.of(family, config, problem, device) for config in tried), refusals=refusals)
