"""A family of kernels: what differs from one to another, in one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...choice import Claims
from ...device import DeviceInfo
from ...problem import Problem
from ...toolchain.record import Record
from .source import KernelSource

__all__ = ["Config", "Family", "Shape", "float32_sums", "likely"]


class Shape(Protocol):
    """What is compiled, beside what the problem asks for."""

    @property
    def threads(self) -> int:
        """The threads of a block, the copying warps included."""
        ...


class Config(Protocol):
    """A shape, and what a launch is told. Its ``str`` tells configs of equal times apart."""

    @property
    def shape(self) -> Shape: ...


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[C]):
    """What a family of kernels serves, which of its configs are tried, and how each is compiled and launched.

    To add one: its configs, ``why_not_config``, a ranking and device code; and a row in ``backend.FAMILIES``. All functions are
    pure.
    """

    name: str
    likely: float
    """Times the least time of the model: what takes longer is tried by an exhaustive search alone."""
    why_not: Callable[[Problem, DeviceInfo], str | None]
    """Why no config at all can serve the problem on the device, or None."""
    why_not_likely: Callable[[Problem, DeviceInfo, str], str | None]
    """Why nothing is tried in a search of such effort, or None."""
    why_not_config: Callable[[Problem, DeviceInfo, C], str | None]
    """Why a config may not be offered for a problem with which ``why_not`` found nothing wrong, or None: the legality predicate."""
    candidates: Callable[[Problem, DeviceInfo], list[C]]
    """Configs, legal or not, the likeliest first."""
    estimate_us: Callable[[Problem, DeviceInfo, C], float]
    """The model's time of one launch."""
    launch_variants: Callable[[Problem, DeviceInfo, C], Iterator[C]]
    """Configs that are the same kernel told otherwise, whether they are legal or not."""
    label: Callable[[Problem, C], str]
    """The config as the end of the choice's name: everything that the kernel is made of and told, but for the problem."""
    claims: Callable[[Problem, C], Claims]
    """The kernel's arithmetic."""
    info: Callable[[Problem, C], dict[str, Any]]
    """The config for the log."""
    source: Callable[[Problem, C], KernelSource]
    """What has to be compiled: the same for all sizes, and for all that a launch can be told."""
    record: Callable[[Problem, C], Record]
    """What launches for the problem are told; all that depends on its sizes is here."""
    instruction: Mapping[torch.dtype, str]
    """With what it multiplies, a pattern of SASS by the dtype of a."""


def likely(family: Family[C], problem: Problem, device: DeviceInfo, ordered: Sequence[C], count: int | None) -> list[C]:
    """The first ``count`` of ordered configs that are likely, no shape twice; all of them for None."""
    if count is None:
        return list(ordered)
    likeliest: dict[Any, C] = {}
    for config in ordered:
        likeliest.setdefault(config.shape, config)
    times_us = {config: family.estimate_us(problem, device, config) for config in likeliest.values()}
    return [config for config, time_us in times_us.items() if time_us <= family.likely * min(times_us.values())][:count]


def float32_sums(*, splits: int = 1, weights: torch.dtype | None = None) -> Claims:
    """Claims of a kernel that adds up in float32, over so many parts of K. ``weights``: the dtype to which weights are rounded."""
    return Claims(accumulate=torch.float32, partials=torch.float32, epilogue_input=torch.float32, splits=splits, weights=weights)
