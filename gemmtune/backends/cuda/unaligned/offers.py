"""Which of the kernel's configs are tried for a problem."""

from __future__ import annotations

from ....choice import Offers
from ....device import DeviceInfo
from ....problem import Problem
from ....settings import Settings
from ..legal import offer
from .build import UnalignedChoice
from .legality import check_config, check_problem
from .rank import candidates, select, why_not_likely

__all__ = ["offers"]

CHOICES: dict[str, int | None] = {"quick": 1, "default": 2, "exhaustive": None}
"""How many kernels are compiled for one problem, each in about three seconds."""


def offers(problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    """The likeliest configs that are legal; needs neither nvcc nor a GPU."""
    count = CHOICES[settings.search]
    reason = check_problem(problem, device)
    if reason is None and count is not None:
        reason = why_not_likely(problem, device)
    return offer(
        "cuda:unaligned",
        reason,
        lambda: candidates(problem, device),
        lambda config: check_config(problem, device, config),
        lambda legal: legal if count is None else select(problem, device, legal, count),
        lambda config: UnalignedChoice.of(config, problem, device),
    )
