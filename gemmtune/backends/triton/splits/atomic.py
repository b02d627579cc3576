"""Split-K whose programs add to one sum in memory: the order, and with it the last bits, changes."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from ....choice import Kernel
from ....device import DeviceInfo
from ....problem import Problem
from ....problem.operations import DENSE_OPS, QUANTIZED_OPS
from ....problem.rules import why_not
from ....toolchain.compiled import Artifact
from ..artifact import mm_artifact
from ..build import KernelChoice, tiled
from ..configs import Config
from ..geometry import geometry
from ..legality import Predicate
from ..persistent.launch import bind_described, interpret_described
from ..source import Source, render_source
from ..workspace import Buffers

__all__ = ["AtomicChoice", "atomic_choice", "why_not_atomic", "why_not_config"]

TEMPLATE = "splits/atomic.py.jinja"
MOST_SUMS = 2**20


@dataclass(frozen=True, kw_only=True)
class AtomicChoice(KernelChoice):
    """The atomic template with one config."""

    @functools.cached_property
    def source(self) -> Source:
        """The rendered kernel."""
        return render_source(self.spec, TEMPLATE)

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The only kernel."""
        return (mm_artifact(self.kernel(), Predicate(self.problem, device), self.config),)

    def bind(self, loaded: Any) -> Kernel:
        """Bind to the problem. On a GPU to the current device, which must be the current device at each call."""
        where, arguments = geometry(self.problem, self.config), self.source.arguments
        elements = where.tiles * self.config.block_m * self.config.block_n
        buffers = Buffers(dtype=self.problem.accumulator, sums=elements, counters=where.tiles)
        if self.target is None:
            return Kernel(run=interpret_described(loaded, arguments, self.problem, where, where.grid, {}, buffers))
        return Kernel(run=bind_described(loaded, arguments, self.problem, where, where.grid, {}, buffers, pdl=self.config.pdl))


def why_not_atomic(problem: Problem, device: DeviceInfo) -> str | None:
    """Why the template has nothing for the problem on this device, or None. Assumes that ``check_problem`` found nothing."""
    reason = why_not(problem, (*DENSE_OPS, *QUANTIZED_OPS))
    if reason is not None:
        return reason
    if device.type == "cuda" and device.capability < 80:
        return f"{device.arch}: no tensor cores for Triton, beside whose absence adding up costs nothing"
    if problem.alpha == "zero" or problem.k == 0:
        return "nothing is multiplied"
    return None


def why_not_config(problem: Problem, device: DeviceInfo, config: Config) -> str | None:
    """Why ``config`` may not be offered for a problem that the template can serve, or None."""
    reason = Predicate(problem, device).check(config)
    if reason is not None:
        return reason
    if config.split_k == 1:
        return "split_k 1: nothing is added up in memory"
    elements = geometry(problem, config).tiles * config.block_m * config.block_n
    if elements > MOST_SUMS:
        return f"{elements} sums: at most {MOST_SUMS} are kept at zero between launches"
    return None


def atomic_choice(problem: Problem, device: DeviceInfo, config: Config) -> AtomicChoice:
    """The choice that runs ``problem`` with ``config``, which must be legal for both and split K."""
    fields = tiled(problem, device, config, geometry(problem, config), "atomic")
    fields["claims"] = dataclasses.replace(fields["claims"], deterministic=not problem.accumulator.is_floating_point)
    fields["info"]["schedule"] = "atomic"
    return AtomicChoice(**fields)
