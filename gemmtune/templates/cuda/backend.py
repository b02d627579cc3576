"""The cuda backend: for small results of long sums, a kernel whose clusters of blocks divide K."""

from __future__ import annotations

from collections import Counter

from ...choice import Availability, Offers, Refusal
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from ...settings import Settings
from ..nvcc import find_compiler
from .build import NAME, CudaChoice
from .configs import Config
from .legality import CAPABILITY, check_config, check_problem
from .rank import candidates, select, why_not_likely

__all__ = ["CudaBackend"]

CHOICES: dict[str, int | None] = {"quick": 2, "default": 4, "exhaustive": None}
"""How many kernels are compiled for one problem, each in about two seconds."""


class CudaBackend:
    """Choices for problems on GPUs of compute capability 9.0."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Yes on a CUDA device; without nvcc, what was compiled before is used."""
        if device.type != "cuda":
            return Availability(ok=False, detail=f"works on CUDA devices, not on {device.type}")
        try:
            return Availability(ok=True, detail=f"nvcc {find_compiler().cuda}")
        except UnavailableError as error:
            return Availability(ok=True, detail=f"only kernels that were compiled before: {error}")

    def serves_by_default(self, device: DeviceInfo) -> bool:
        """Where it has a kernel."""
        return device.type == "cuda" and device.capability == CAPABILITY

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """The likeliest configs that are legal; needs neither nvcc nor a GPU."""
        reason = check_problem(problem, device) or why_not_likely(problem, device, settings.search)
        if reason is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        legal: list[Config] = []
        refused: Counter[str] = Counter()
        for config in candidates(problem, device):
            why_not = check_config(problem, device, config)
            if why_not is None:
                legal.append(config)
            else:
                refused[why_not] += 1
        count = CHOICES[settings.search]
        chosen = legal if count is None else select(legal, count)
        return Offers(
            choices=tuple(CudaChoice.of(config, problem, device) for config in chosen),
            refusals=tuple(Refusal(name=f"{NAME}:{n} configs", reason=why, count=n) for why, n in refused.most_common()),
        )
