"""Which configs of the kernel for few rows are tried for a problem."""

from __future__ import annotations

from ....choice import Offers, Refusal
from ....device import DeviceInfo
from ....problem import Problem
from ....settings import Settings
from ..legal import legal_configs
from .build import FewChoice
from .legality import check_config, check_problem
from .rank import candidates, select

__all__ = ["offers"]

NAME = "cuda:few"
CHOICES: dict[str, int | None] = {"quick": 2, "default": 4, "exhaustive": None}
"""How many kernels are compiled for one problem, each in about three seconds."""


def offers(problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
    """The likeliest configs that are legal; needs neither nvcc nor a GPU."""
    reason = check_problem(problem, device)
    if reason is not None:
        return Offers(refusals=(Refusal(name=NAME, reason=reason),))
    legal, refusals = legal_configs(NAME, candidates(problem, device), lambda config: check_config(problem, device, config))
    count = CHOICES[settings.search]
    chosen = legal if count is None else select(problem, device, legal, count)
    return Offers(
        choices=tuple(FewChoice.of(config, problem, device) for config in chosen),
        refusals=refusals,
    )
