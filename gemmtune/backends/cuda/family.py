"""Base class of a kernel family, and checks that all families share."""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...choice import Claims
from ...device import DeviceInfo
from ...numerics.reduction import Reduction
from ...problem import Problem
from ...problem.dtypes import dtype_name
from ...toolchain import structs
from ...toolchain.record import A, B, Record, TensorMap, with_maps
from .hopper import CAPABILITY, TMA_BYTES
from .kernel import KernelSource, Work, addresses_of, scalars_of

INT32_LIMIT = 2**31
FACTORS = (torch.bfloat16, torch.float16)
"""Dtypes of a and b."""
NAMED_STEPS, NAMED_NEAR = 4, 8
"""Steps of launch parameters from a candidate to a named config, and configs of the most similar labels that each step varies."""
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of results and of epilogue operands."""


class Shape(Protocol):
    """Compile-time parameters of a kernel that do not follow from the problem."""

    @property
    def threads(self) -> int:
        """Threads of one block, the copying warps included."""
        ...


class Config(Protocol):
    """Shape plus launch parameters. Its ``str`` orders configs of equal estimated time."""

    @property
    def shape(self) -> Shape: ...


C = TypeVar("C", bound=Config)


class Family(ABC, Generic[C]):
    """Family of kernels: problems it serves, configs it tries, and how each is compiled and launched.

    A new family needs configs, a subclass with a legality predicate and a ranking, device code, and a row in ``backend.FAMILIES``.
    All methods are pure.
    """

    name: str
    package: str
    """Package with the family's templates. The translation unit has the family's name."""
    likely: float
    """Multiple of the least estimated time. Only an exhaustive search tries slower configs."""
    instruction: Mapping[torch.dtype, str]
    """SASS pattern of the multiplying instruction, by the dtype of a."""
    legal_between: bool = False
    """Flag of ``Choice.legal_between``: the predicates restrict M only by alignment, a minimum and a maximum."""

    @abstractmethod
    def why_not(self, problem: Problem, device: DeviceInfo) -> str | None:
        """Return the reason why no config can serve the problem on the device, or None."""

    def why_not_likely(self, problem: Problem, device: DeviceInfo, search: str) -> str | None:  # noqa: ARG002 - most try all
        """Return the reason why a search of this effort tries nothing, or None."""
        return None

    @abstractmethod
    def why_not_config(self, problem: Problem, device: DeviceInfo, config: C) -> str | None:
        """Return the reason why a config is illegal for a problem that ``why_not`` accepts, or None: the legality predicate."""

    @abstractmethod
    def candidates(self, problem: Problem, device: DeviceInfo) -> list[C]:
        """Return configs, legal or not, the likeliest first."""

    @abstractmethod
    def estimate_us(self, problem: Problem, device: DeviceInfo, config: C) -> float:
        """Return the model's time of one launch, in microseconds."""

    @abstractmethod
    def launch_variants(self, problem: Problem, device: DeviceInfo, config: C) -> Iterator[C]:
        """Yield configs, legal or not, that launch the same kernel with other parameters."""

    @property
    def kernel(self) -> str:
        """Name of the main kernel."""
        return f"gemmtune_{self.name}"

    def label(self, problem: Problem, config: C) -> str:  # noqa: ARG002 - most labels ignore the problem
        """Return the end of the choice's name. It states all compile-time and launch parameters except the problem's own."""
        return str(config)

    @abstractmethod
    def claims(self, problem: Problem, config: C) -> Claims:
        """Return the kernel's arithmetic."""

    def reduction(self, problem: Problem, config: C) -> Reduction | None:  # noqa: ARG002 - most declare nothing
        """Return how the kernel sums K, a function of config and K. None: the family does not say."""
        return None

    def batch_invariant(self, problem: Problem, config: C) -> bool:  # noqa: ARG002 - most are
        """Return True if partial sums of a row are added in the same order wherever the row lies in a tile."""
        return True

    @abstractmethod
    def info(self, problem: Problem, config: C) -> dict[str, Any]:
        """Return the config as fields for the log."""

    @abstractmethod
    def source(self, problem: Problem, config: C) -> KernelSource:
        """Return the source to compile. Sizes, strides and launch parameters do not change it."""

    @abstractmethod
    def record(self, problem: Problem, config: C) -> Record:
        """Return the launch record for the problem. Everything that depends on its sizes is here."""

    def facts(self, config: Any, tile: Sequence[int], *, cluster: int = 1, splits: int = 1) -> dict[str, Any]:
        """Return the ``info`` fields common to all configs: the tile and every launch parameter."""
        launched = {name: getattr(config, name) for name in config.__dataclass_fields__ if name != "shape"}
        shape = config.shape
        fixed = {"tile": list(tile), "stages": shape.stages, "warps": shape.threads // 32, "cluster": cluster, "splits": splits}
        return fixed | launched

    def made(self, files: Sequence[tuple[str, str]], values: Mapping[str, Any], **more: Any) -> KernelSource:
        """Return the source of the family's translation unit with these parts and values."""
        unit = (self.package, f"{self.name}.cu.jinja")
        return KernelSource(kernel=self.kernel, unit=unit, files=tuple(files), values=values, **more)

    def launch(self, problem: Problem, config: Any, work: Work, maps: Sequence[TensorMap] = (), **more: Any) -> Record:
        """Return the launch record of the main kernel with the parameters ``work``, after ``maps`` if there are any.

        ``more`` has the grid, addresses after those of all operands, and fields that are unlike most families'.
        """
        shape, count = config.shape, _operands_before(problem) + len(problem.epilogue.operands if problem.epilogue else ())
        more["addresses"] = (*addresses_of(count), *more.get("addresses", ()))
        usual = {"cluster": 1, "shared_bytes": shape.shared_bytes, "pdl": config.pdl, "alignment": ((A, TMA_BYTES), (B, TMA_BYTES))}
        given = usual | {"scalars": scalars_of(problem)} | more
        record = Record(kernel=self.kernel, threads=shape.threads, parameters=bytes(work), **given)
        return with_maps(record, maps) if maps else record

    def packed_format(self, problem: Problem, config: C) -> str | None:  # noqa: ARG002 - most families take b unchanged
        """Return the layout name that a prepacked b must have, or None for b unchanged."""
        return None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        """Return b in the packed format."""
        return b

    def named(self, problem: Problem, device: DeviceInfo, label: str) -> C | None:
        """Return the legal config with this label: a candidate, or one with other launch parameters. None if there is none."""
        if self.why_not(problem, device) is not None:
            return None
        found = {self.label(problem, config): config for config in self.candidates(problem, device)}
        for _ in range(NAMED_STEPS):
            if label in found:
                break
            near = sorted(found, key=lambda known: len(os.path.commonprefix([known, label])), reverse=True)[:NAMED_NEAR]  # noqa: RUF071
            found |= {self.label(problem, c): c for x in near for c in self.launch_variants(problem, device, found[x])}
        config = found.get(label)
        return config if config is not None and self.why_not_config(problem, device, config) is None else None

    def likeliest(self, problem: Problem, device: DeviceInfo, ordered: Sequence[C], count: int | None) -> list[C]:
        """Return the first ``count`` likely configs, each shape once. Return all configs if ``count`` is None."""
        if count is None:
            return list(ordered)
        likeliest: dict[Any, C] = {}
        for config in ordered:
            likeliest.setdefault(config.shape, config)
        times_us = {config: self.estimate_us(problem, device, config) for config in likeliest.values()}
        return [config for config, time_us in times_us.items() if time_us <= self.likely * min(times_us.values())][:count]


def beginnings(config: C, stages: int) -> Iterator[C]:
    """Yield the config with PDL switched, and with L2 prefetch of its first ``stages`` switched where PDL is on."""
    varied: Any = config
    yield dataclasses.replace(varied, pdl=not varied.pdl, prefetch_stages=0)
    if varied.pdl:
        yield dataclasses.replace(varied, prefetch_stages=0 if varied.prefetch_stages else stages)


def float32_sums(*, splits: int = 1, weights: torch.dtype | None = None) -> Claims:
    """Return claims of float32 sums over ``splits`` parts of K. ``weights``: dtype to which weights are rounded."""
    return Claims(accumulate=torch.float32, splits=splits, weights=weights)


def why_not_here(problem: Problem, device: DeviceInfo) -> str | None:
    """Return the reason why no CUDA kernel serves the device or the dtypes of a and the result, or None."""
    if (reason := why_not_device(device)) is not None:
        return reason
    if problem.dtype not in FACTORS:
        return f"a is {dtype_name(problem.dtype)}, expected bfloat16 or float16"
    return why_not_result(problem)


def why_not_device(device: DeviceInfo) -> str | None:
    if device.type != "cuda" or device.capability != CAPABILITY:
        return f"works on CUDA devices of compute capability 9.0, not on {device.arch}"
    return None


def why_not_result(problem: Problem) -> str | None:
    """Return the reason why the result's dtype or sizes are not supported, or None."""
    if problem.out.dtype not in RESULTS:
        return f"the result is {dtype_name(problem.out.dtype)}, expected one of {', '.join(map(dtype_name, RESULTS))}"
    if problem.empty or problem.k == 0:
        return "the product is empty: nothing is launched"
    if max(problem.m, problem.n, problem.k, problem.batch) >= INT32_LIMIT:
        return "a size does not fit 32 bits"
    return None


def why_not_epilogue(problem: Problem) -> str | None:
    return structs.why_not_epilogue(problem, structs.MOST_OPERANDS - _operands_before(problem), RESULTS)


def _operands_before(problem: Problem) -> int:
    """Return how many operands follow a and b before those of the epilogue."""
    return (problem.inp_read is not None) + len(problem.scales) + (problem.offs is not None)
