"""Which configs of the kernel for more rows are tried for a problem."""

from __future__ import annotations

from ....choice import Offers
from ....device import DeviceInfo
from ....problem import Problem
from ....settings import Settings
from ..legal import offer
from .build import WideChoice
from .legality import check_config, check_problem
from .rank import candidates, select, why_not_likely

__all__ = ["offers"]

CHOICES: dict[str, int | None] = {"quick": 2, "default": 4, "exhaustive": None}
"""How many kernels are compiled for one problem, each in about three seconds."""


def offers(problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    """The likeliest configs that are legal; needs neither nvcc nor a GPU."""
    count = CHOICES[settings.search]
    return offer(
        "cuda:wide",
        check_problem(problem, device) or why_not_likely(problem, settings.search),
        lambda: candidates(problem, device),
        lambda config: check_config(problem, device, config),
        lambda legal: legal if count is None else select(problem, device, legal, count),
        lambda config: WideChoice.of(config, problem, device),
    )
