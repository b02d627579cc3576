"""The cpp backend: packed GEMM for CPUs, compiled on the machine that runs it."""

from collections.abc import Iterable
from itertools import islice

from ...choice import Availability, Choice, Offers, Refusal
from ...device import DeviceInfo
from ...errors import ONLY_COMPILED
from ...problem import Problem
from ...settings import Settings
from .bsr import block_offers
from .build import NAME, CppChoice, name_of
from .compiler import find_compiler, why_no_compiler
from .configs import VECTOR_BYTES, Config, candidates, configs, refusal, unsupported


class CppBackend:
    """Backend that serves every problem on a CPU."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Return if the backend can run: on a CPU. Without a C++ compiler, only kernels compiled before can run."""
        if device.type != "cpu":
            return Availability(ok=False, detail=f"works on a CPU, not on {device.type}")
        reason, compiler = why_no_compiler(), find_compiler()
        if reason is not None or compiler is None:
            return Availability(ok=True, detail=f"{ONLY_COMPILED}: {reason}")
        return Availability(ok=True, detail=f"{compiler.version}, {device.arch} kernels")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        return device.type == "cpu"

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """Return the legal configurations of a search. Needs neither a compiler nor the CPU in question."""
        if problem.sparsity is not None:
            return block_offers(problem, device)
        reason = unsupported(problem) or (f"no kernels for {device.arch}" if device.arch not in VECTOR_BYTES else None)
        if reason is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        return self.choices_of(configs(problem, device, settings.search), problem, device)

    def named(self, name: str, problem: Problem, device: DeviceInfo) -> Choice | None:
        """Return the choice with this name among those of an exhaustive search, or None."""
        if problem.sparsity is not None:
            return next((choice for choice in block_offers(problem, device).choices if choice.name == name), None)
        if device.arch not in VECTOR_BYTES or unsupported(problem) is not None:
            return None
        found = (x for x in candidates(problem, device, "exhaustive") if name_of(x, problem, device) == name)
        return next(iter(self.choices_of(islice(found, 1), problem, device).choices), None)

    def choices_of(self, found: Iterable[Config], problem: Problem, device: DeviceInfo) -> Offers:
        choices, refusals = [], []
        for config in found:
            reason = refusal(config, problem, device)
            if reason is None:
                choices.append(CppChoice.of(config, problem, device))
            else:
                refusals.append(Refusal(name=name_of(config, problem, device), reason=reason))
        return Offers(choices=tuple(choices), refusals=tuple(refusals))
