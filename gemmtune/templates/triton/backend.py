"""The Triton backend: which choices it has for a problem."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace

from ...choice import Availability, Offers, Refusal
from ...device import DeviceInfo
from ...problem import Problem
from ...settings import Settings
from .build import TritonChoice, choice_for
from .configs import SET_SIZES, Config, pool, splits_for
from .legality import Predicate, Resources, check_problem
from .padding import PADDED_CHOICES, padded_choices
from .rank import select

__all__ = ["TritonBackend"]

INTERPRETER_CONFIGS = (
    Config(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    Config(block_m=32, block_n=16, block_k=32, stages=2, warps=4),
    Config(block_m=16, block_n=32, block_k=16, stages=1, warps=1, split_k=2),
    Config(block_m=64, block_n=64, block_k=64, stages=2, warps=4),
)
"""What the interpreter tries: it ignores stages and warps, and serves to check values."""


class TritonBackend:
    """Choices from the mm template."""

    name = "triton"

    def available(self, device: DeviceInfo) -> Availability:
        """Triton must be installed; for a CPU its interpreter must be on, for a GPU off."""
        if importlib.util.find_spec("triton") is None:
            return Availability(ok=False, detail="triton is not installed: pip install 'gemmtune[triton]'")
        import triton  # noqa: PLC0415 - heavy, and asked for only where it is there

        if device.type == "cpu" and not triton.knobs.runtime.interpret:
            return Availability(
                ok=False,
                detail=f"triton {triton.__version__} runs on a CPU only in its interpreter: set TRITON_INTERPRET=1 before the "
                "program starts, and name the backend in settings.backends",
            )
        if device.type != "cpu" and triton.knobs.runtime.interpret:
            return Availability(ok=False, detail=f"triton {triton.__version__} interprets: unset TRITON_INTERPRET to use a GPU")
        return Availability(ok=True, detail=f"triton {triton.__version__}" + (", interpreter" if device.type == "cpu" else ""))

    def serves_by_default(self, device: DeviceInfo) -> bool:
        """On a GPU only: the interpreter is for checking values."""
        return device.type != "cpu"

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """The configs of the search's set that are legal, the best by the model first. Pure: any preset device will do."""
        reason = check_problem(problem, device)
        if reason is not None:
            return Offers(refusals=(Refusal(name=self.name, reason=reason),))
        if device.type == "cpu":
            return self._interpreted(problem, device)
        chosen = chosen_configs(problem, device, settings.search)
        if not chosen:
            return Offers(refusals=(Refusal(name=self.name, reason=f"no config is legal for {problem} on {device.arch}"),))
        direct = [choice_for(problem, device, config) for config in chosen]
        most = PADDED_CHOICES[settings.search]
        padded = padded_choices(problem, device, most, lambda aligned: chosen_configs(aligned, device, settings.search))
        return Offers(choices=(*direct, *padded))

    def _interpreted(self, problem: Problem, device: DeviceInfo) -> Offers:
        predicate = Predicate(problem, device)
        choices: list[TritonChoice] = []
        refusals: list[Refusal] = []
        for config in INTERPRETER_CONFIGS:
            reason = predicate.check(config)
            if reason is None:
                choices.append(choice_for(problem, device, config))
            else:
                refusals.append(Refusal(name=f"{self.name}:{config}", reason=reason))
        return Offers(choices=tuple(choices), refusals=tuple(refusals))


@functools.lru_cache(maxsize=1024)
def chosen_configs(problem: Problem, device: DeviceInfo, search: str) -> tuple[Config, ...]:
    """The configs of a search, best by the model first."""
    predicate = Predicate(problem, device)
    return tuple(select(predicate, legal_configs(predicate), SET_SIZES[search]))


def legal_configs(predicate: Predicate) -> list[tuple[Config, Resources]]:
    """Every config of the pool that the legality predicate admits, with its resources."""
    problem, legal = predicate.problem, []
    for config in pool():
        if predicate.check(config) is not None:
            continue
        need = predicate.resources(config)
        legal.append((config, need))
        tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n) * problem.batch
        for split_k in splits_for(tiles, predicate.device.sm_count)[1:]:
            split = replace(config, split_k=split_k)
            if predicate.check_split(split) is None:
                legal.append((split, need))
    return legal
