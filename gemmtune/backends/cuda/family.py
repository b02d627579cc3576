"""A family of kernels: what differs from one to another."""

from __future__ import annotations

import ctypes
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...choice import Claims
from ...device import DeviceInfo
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ...toolchain import structs
from ...toolchain.record import Record
from .hopper import CAPABILITY
from .kernel import KernelSource

INT32_LIMIT = 2**31
FACTORS = (torch.bfloat16, torch.float16)
"""Dtypes that are multiplied."""
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that are stored, and that an epilogue reads."""


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


class Family(ABC, Generic[C]):
    """What a family of kernels serves, which of its configs are tried, and how each is compiled and launched.

    To add one: its configs, a family with a predicate and a ranking, and device code; and a row in ``backend.FAMILIES``. All
    methods are pure.
    """

    name: str
    likely: float
    """Times the least time of the model: what takes longer is tried by an exhaustive search alone."""
    instruction: Mapping[torch.dtype, str]
    """The instruction that multiplies, a pattern of SASS by the dtype of a."""
    legal_between: bool = False
    """As ``Choice.legal_between``: of M, its predicates ask but alignment, and whether it is too small or too large."""

    @abstractmethod
    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        """Why no config at all can serve the problem on the device, or None."""

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - most try all
        """Why nothing is tried in a search of such effort, or None."""
        return None

    @abstractmethod
    def why_not_config(self, problem: Problem, device: DeviceInfo, config: C) -> str | None:
        """The legality predicate: why a config may not be offered for a problem that ``why_not`` lets pass, or None."""

    @abstractmethod
    def candidates(self, problem: Problem, device: DeviceInfo) -> list[C]:
        """Configs, legal or not, the likeliest first."""

    @abstractmethod
    def estimate_us(self, problem: Problem, device: DeviceInfo, config: C) -> float:
        """The model's time of one launch, in microseconds."""

    @abstractmethod
    def launch_variants(self, problem: Problem, device: DeviceInfo, config: C) -> Iterator[C]:
        """Configs that are the same kernel told otherwise, whether they are legal or not."""

    @property
    def kernel(self) -> str:
        """The name of the kernel that multiplies."""
        return f"gemmtune_{self.name}"

    def label(self, problem: Problem, config: C) -> str:  # noqa: ARG002 - most tell nothing of the problem
        """The config as the end of the choice's name: everything that the kernel is made of and told, but for the problem."""
        return str(config)

    @abstractmethod
    def claims(self, problem: Problem, config: C) -> Claims:
        """The kernel's arithmetic."""

    @abstractmethod
    def info(self, problem: Problem, config: C) -> dict[str, Any]:
        """The config for the log."""

    @abstractmethod
    def source(self, problem: Problem, config: C) -> KernelSource:
        """What has to be compiled: the same for all sizes and strides, and for all that a launch can be told."""

    @abstractmethod
    def record(self, problem: Problem, config: C) -> Record:
        """What launches for the problem are told; all that depends on its sizes is here."""

    def facts(self, config: Any, tile: Sequence[int], *, cluster: int = 1, splits: int = 1) -> dict[str, Any]:
        """What ``info`` has of every config: its tile, and all that a launch is told."""
        told = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "shape"}
        shape = config.shape
        fixed = {"tile": list(tile), "stages": shape.stages, "warps": shape.threads // 32, "cluster": cluster, "splits": splits}
        return fixed | told

    def launch(self, config: Any, work: ctypes.Structure, **more: Any) -> Record:
        """The record of a launch of the kernel that multiplies, which is told ``work``."""
        shape = config.shape
        more = {"shared_bytes": shape.shared_bytes, "pdl": config.pdl} | more
        return Record(kernel=self.kernel, threads=shape.threads, parameters=bytes(work), **more)

    def packed_format(self, problem: Problem, config: C) -> str | None:  # noqa: ARG002 - most take b as it is
        """The name of the layout in which a prepacked b is wanted; None: as it is."""
        return None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """b in the packed format."""
        return b

    def likeliest(self, problem: Problem, device: DeviceInfo, ordered: Sequence[C], count: int | None) -> list[C]:
        """The first ``count`` of ordered configs that are likely, no shape twice; all of them for None."""
        if count is None:
            return list(ordered)
        likeliest: dict[Any, C] = {}
        for config in ordered:
            likeliest.setdefault(config.shape, config)
        times_us = {config: self.estimate_us(problem, device, config) for config in likeliest.values()}
        return [config for config, time_us in times_us.items() if time_us <= self.likely * min(times_us.values())][:count]


def beginnings(config: C, stages: int) -> Iterator[C]:
    """The config told to begin otherwise: before the launch before it has ended or not, and then asking for stages or for none."""
    told: Any = config
    yield dataclasses.replace(told, pdl=not told.pdl, prefetch_stages=0)
    if told.pdl:
        yield dataclasses.replace(told, prefetch_stages=0 if told.prefetch_stages else stages)


def float32_sums(*, splits: int = 1, weights: torch.dtype | None = None) -> Claims:
    """Claims of a kernel that adds up in float32, over so many parts of K. ``weights``: the dtype to which weights are rounded."""
    return Claims(accumulate=torch.float32, splits=splits, weights=weights)


def why_not_here(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no kernel of ours serves the device, or the dtypes of a and of the result; or None."""
    if (reason := why_not_device(device)) is not None:
        return reason
    if problem.dtype not in FACTORS:
        return f"a is {dtype_name(problem.dtype)}, expected bfloat16 or float16"
    return why_not_result(problem)


def why_not_device(device: DeviceInfo) -> str | None:
    """Why no kernel of ours serves the device, or None."""
    if device.type != "cuda" or device.capability != CAPABILITY:
        return f"works on CUDA devices of compute capability 9.0, not on {device.arch}"
    return None


def why_not_result(problem: Problem) -> str | None:
    """Why the result cannot be stored, for its dtype or its sizes, or None."""
    if problem.out.dtype not in RESULTS:
        return f"the result is {dtype_name(problem.out.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if problem.empty or problem.k == 0:
        return "the product is empty: nothing is launched"
    if max(problem.m, problem.n, problem.k, problem.batch) >= INT32_LIMIT:
        return "a size does not fit 32 bits"
    return None


def why_not_epilogue(problem: Problem) -> str | None:
    """Why the epilogue cannot be expressed, or None."""
    before = (problem.inp_read is not None) + len(problem.scales) + (problem.offs is not None)
    return structs.why_not_epilogue(problem, structs.MOST_OPERANDS - before, RESULTS)
