"""Which of the cluster kernel's configs are tried for a problem."""

from __future__ import annotations

from ....choice import Offers
from ....device import DeviceInfo
from ....problem import Problem
from ....settings import Settings
from ..legal import offer
from .build import ClusterChoice
from .legality import check_config, check_problem
from .rank import candidates, select, why_not_likely

__all__ = ["offers"]

CHOICES: dict[str, int | None] = {"quick": 2, "default": 5, "exhaustive": None}
"""How many kernels are compiled for one problem, each in about two seconds."""


def offers(problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    """The likeliest configs that are legal; needs neither nvcc nor a GPU."""
    count = CHOICES[settings.search]
    return offer(
        "cuda:cluster",
        check_problem(problem, device) or why_not_likely(problem, device, settings.search),
        lambda: candidates(problem, device),
        lambda config: check_config(problem, device, config),
        lambda legal: legal if count is None else select(problem, device, legal, count),
        lambda config: ClusterChoice.of(config, problem, device),
    )
