"""The Triton backend: which choices it has for a problem."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...choice import Availability, Choice, Offers, Refusal
from ...device import DeviceInfo
from ...effort import EFFORT
from ...problem import Problem
from ...settings import Settings
from .build import KernelChoice, TritonChoice
from .configs import Config, pool, splits_for
from .legality import Predicate, Resources, check_problem
from .mixed.offers import with_recommendation, words_choices
from .mixed.vec import words_vector_choices
from .padding import padded_choices
from .persistent.choice import persistent_choices
from .rank import select
from .small.swap import swapped_choices
from .small.vec import vector_choices
from .splits.offers import choices_for_long_sums
from .sums import kernel_for, predicate_for

__all__ = ["TritonBackend"]

INTERPRETER_CONFIGS = (
    Config(block_m=16, block_n=16, block_k=16, stages=1, warps=1),
    Config(block_m=16, block_n=16, block_k=32, stages=1, warps=1),
    Config(block_m=32, block_n=16, block_k=32, stages=2, warps=4),
    Config(block_m=16, block_n=32, block_k=16, stages=1, warps=1, split_k=2),
    Config(block_m=64, block_n=64, block_k=64, stages=2, warps=4),
)
"""What the interpreter tries: it ignores stages and warps, and serves to check values."""


class TritonBackend:
    """Choices from the mm template and its relatives."""

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
        """Serves a GPU only: the interpreter is for checking values."""
        return device.type != "cpu"

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """The configs of the search's set that are legal, the best by the model first. Pure: any preset device will do."""
        reason = check_problem(problem, device)
        if reason is not None:
            return Offers(refusals=(Refusal(name=self.name, reason=reason),))
        if device.type == "cpu":
            return self._interpreted(problem, device)
        if not chosen_configs(problem, device, settings.search):
            return Offers(refusals=(Refusal(name=self.name, reason=f"no config is legal for {problem} on {device.arch}"),))
        choices = [choice for family in FAMILIES for choice in family(problem, device, settings.search)]
        return Offers(choices=with_recommendation(problem, choices))

    def _interpreted(self, problem: Problem, device: DeviceInfo) -> Offers:
        predicate = predicate_for(problem, device)
        choices: list[KernelChoice] = []
        refusals: list[Refusal] = []
        for config in INTERPRETER_CONFIGS:
            reason = predicate.check(config)
            if reason is None:
                choices.append(kernel_for(problem, device, config))
            else:
                refusals.append(Refusal(name=f"{self.name}:{config}", reason=reason))
        return Offers(choices=tuple(choices), refusals=tuple(refusals))


def direct_choices(problem: Problem, device: DeviceInfo, search: str) -> Sequence[Choice]:
    """The mm template, or that of a sum, on the operands as they are; fewer of it where weights have a template of their own."""
    most = EFFORT[search].configs["triton:mm"]
    if most is not None:
        most -= len(choices_for_weights(problem, device, search))
    return [kernel_for(problem, device, config) for config in chosen_configs(problem, device, search)[:most]]


def choices_for_weights(problem: Problem, device: DeviceInfo, search: str) -> Sequence[Choice]:
    """Weights read as words."""
    return (
        *words_choices(problem, device, EFFORT[search].configs["triton:words"]),
        *words_vector_choices(problem, device, EFFORT[search].configs["triton:words_vector"]),
    )


def choices_on_copies(problem: Problem, device: DeviceInfo, search: str) -> Sequence[Choice]:
    """The mm template, and programs that work off tile after tile, on aligned copies of the operands."""
    counts = EFFORT[search].configs

    def kernels(aligned: Problem) -> Sequence[KernelChoice]:
        return (
            *(
                TritonChoice.of(aligned, device, config)
                for config in chosen_configs(aligned, device, search)[: counts["triton:padded"]]
            ),
            *persistent_choices(aligned, device, counts["triton:padded_persistent"]),
        )

    return padded_choices(problem, device, kernels)


def choices_for_few_rows(problem: Problem, device: DeviceInfo, search: str) -> Sequence[Choice]:
    """The mm template with swapped operands, and products without tensor cores."""
    return (
        *swapped_choices(problem, device, EFFORT[search].configs["triton:swapped"]),
        *vector_choices(problem, device, EFFORT[search].configs["triton:vector"]),
    )


def choices_over_tiles(problem: Problem, device: DeviceInfo, search: str) -> Sequence[Choice]:
    """Programs that work off tile after tile."""
    return persistent_choices(problem, device, EFFORT[search].configs["triton:persistent"])


def choices_that_divide_sums(problem: Problem, device: DeviceInfo, search: str) -> Sequence[Choice]:
    """Other ways to divide a long sum than the mm template's."""
    return choices_for_long_sums(problem, device, search, lambda divided: chosen_configs(divided, device, search))


FAMILIES: tuple[Callable[[Problem, DeviceInfo, str], Sequence[Choice]], ...] = (
    choices_for_weights,
    direct_choices,
    choices_over_tiles,
    choices_for_few_rows,
    choices_that_divide_sums,
    choices_on_copies,
)
"""What the backend has for a GPU: (problem, device, search) to choices, each with its own predicate and its own ranking."""


@functools.lru_cache(maxsize=1024)
def chosen_configs(problem: Problem, device: DeviceInfo, search: str) -> tuple[Config, ...]:
    """The configs of a search, best by the model first."""
    predicate = predicate_for(problem, device)
    return tuple(select(predicate, legal_configs(predicate), EFFORT[search].configs["triton:mm"]))


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
