"""The cpp backend: packed GEMM for CPUs, compiled on the machine where it runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...choice import Availability, Claims, Offers, Refusal
from ...device import DeviceInfo
from ...problem import Problem
from ...settings import Settings
from .build import CppChoice
from .compiler import COMPILERS, find_compiler
from .configs import VECTOR_BYTES, Config, configs, refusal, unsupported
from .operands import uses_vnni

__all__ = ["CppBackend"]

NAME = "cpp"


class CppBackend:
    """Choices for every problem on a CPU."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Yes on a CPU with a C++ compiler."""
        if device.type != "cpu":
            return Availability(ok=False, detail=f"works on a CPU, not on {device.type}")
        compiler = find_compiler()
        if compiler is None:
            return Availability(ok=False, detail=f"no C++ compiler on PATH ({', '.join(COMPILERS)}); install g++ or clang++")
        return Availability(ok=True, detail=f"{compiler.version}, {device.arch} kernels")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        """Serves every CPU."""
        return device.type == "cpu"

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Legal configurations of the search's size; needs neither compiler nor that CPU."""
        reason = unsupported(problem)
        if reason is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        if device.arch not in VECTOR_BYTES:
            return Offers(refusals=(Refusal(name=NAME, reason=f"no kernels for {device.arch}"),))
        return self.choices_of(configs(problem, device, settings.search), problem, device)

    def choices_of(self, found: Iterable[Config], problem: Problem, device: DeviceInfo) -> Offers:
        """The legal ones of some configurations as choices, the others as refusals."""
        choices, refusals = [], []
        for config in found:
            reason = refusal(config, problem, device)
            if reason is None:
                choices.append(_choice(config, problem, device))
            else:
                refusals.append(Refusal(name=_name(config, problem, device), reason=reason))
        return Offers(choices=tuple(choices), refusals=tuple(refusals))


def _name(config: Config, problem: Problem, device: DeviceInfo) -> str:
    tile = f"{config.mr}x{config.nr(device.arch, problem.accumulator)}"
    isa = f"{device.arch}{'vnni' if uses_vnni(problem, device) else ''}"
    name = f"{NAME}:{isa}_{tile}_{config.mode}_kc{config.kc}_t{config.task_m}x{config.task_n}"
    return f"{name}_direct" if config.direct else name


def _choice(config: Config, problem: Problem, device: DeviceInfo) -> CppChoice:
    return CppChoice(
        name=_name(config, problem, device),
        backend=NAME,
        problem=problem,
        claims=_claims(config, problem),
        info={
            "mode": config.mode, "mr": config.mr, "nr": config.nr(device.arch, problem.accumulator), "kc": config.kc,
            "task_m": config.task_m, "task_n": config.task_n, "direct": config.direct,
        },
        arch=device.arch,
        vnni=uses_vnni(problem, device),
        config=config,
    )  # fmt: skip


def _claims(config: Config, problem: Problem) -> Claims:
    """Sums in the accumulator's dtype throughout; weights are scaled as float32 numbers before they are multiplied."""
    accumulator = problem.accumulator
    return Claims(
        accumulate=accumulator,
        partials=accumulator,
        epilogue_input=problem.epilogue_dtype if problem.epilogue else accumulator,
        splits=max(1, -(-problem.k // config.kc)),
        weights=torch.float32 if problem.widens_b and problem.scale_b is not None else None,
    )
