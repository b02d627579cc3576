"""The cutlass backend: which operations serve a problem, ranked before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from ...allowed import why_not_named
from ...choice import Availability, Claims, Offers, Refusal
from ...device import DeviceInfo
from ...errors import UnavailableError
from ...problem import Problem
from ...settings import Settings, current
from .build import CutlassChoice
from .catalogue import operations
from .configs import AXES, Axes, Config, check_problem, elements_of, legal_orientation, splits_of
from .operation import Operation
from .orientation import Oriented
from .rank import estimate_us, select
from .toolkit import Toolkit, find_compiler, find_toolkit

__all__ = ["CutlassBackend"]

NAME = "cutlass"
OPERATIONS: dict[str, int | None] = {"quick": 3, "default": 12, "exhaustive": None}
"""How many operations are compiled for one problem."""
AXES_TRIED: dict[str, int] = {"quick": 1, "default": 2, "exhaustive": len(AXES)}
"""How many sets of axes each of them is tried with."""


class CutlassBackend:
    """Choices for dense problems on NVIDIA GPUs."""

    name = NAME

    def available(self, device: DeviceInfo) -> Availability:
        """Yes on a CUDA device with CUTLASS; without nvcc, what was compiled before is used."""
        found = _toolchain(current())
        if device.type != "cuda":
            return Availability(ok=False, detail=f"works on CUDA devices, not on {device.type}; here: {found.detail}")
        return found

    def serves_by_default(self, device: DeviceInfo) -> bool:  # noqa: ARG002 - nowhere
        """Only where it is named: its kernels take half a minute each to compile."""
        return False

    def enumerate(self, problem: Problem, device: DeviceInfo, settings: Settings) -> Offers:
        """The best operations of the search's size; needs CUTLASS, but neither nvcc nor a GPU."""
        reason = check_problem(problem, device)
        if reason is not None:
            return Offers(refusals=(Refusal(name=NAME, reason=reason),))
        try:
            toolkit = find_toolkit(settings.cutlass_dir)
            found = [op for element in elements_of(problem) for op in operations(toolkit, device.capability, element)]
        except UnavailableError as error:
            return Offers(refusals=(Refusal(name=NAME, reason=str(error)),))
        legal, refusals = _legal(found, problem, device)
        allowed, left_out = _allowed(legal, settings)
        timed = [(estimate_us(op, legal[op], problem, device), op) for op in allowed]
        choices = [
            _choice(Config(operation=op, axes=axes), problem, device, toolkit, exchanged=legal[op].exchanged)
            for op in select(timed, OPERATIONS[settings.search])
            for axes in allowed[op][: AXES_TRIED[settings.search]]
        ]
        return Offers(choices=tuple(choices), refusals=(*refusals, *left_out))


def _toolchain(settings: Settings) -> Availability:
    """CUTLASS and nvcc of this machine."""
    try:
        toolkit = find_toolkit(settings.cutlass_dir)
    except UnavailableError as error:
        return Availability(ok=False, detail=str(error))
    try:
        return Availability(ok=True, detail=f"CUTLASS {toolkit.version}, nvcc {find_compiler().cuda}")
    except UnavailableError as error:
        return Availability(ok=True, detail=f"CUTLASS {toolkit.version}, only kernels that were compiled before: {error}")


def _legal(found: list[Operation], problem: Problem, device: DeviceInfo) -> tuple[dict[Operation, Oriented], list[Refusal]]:
    """How each legal operation computes the problem; and one refusal for each reason why others do not."""
    legal: dict[Operation, Oriented] = {}
    refused: Counter[str] = Counter()
    for op in _without_twins(found):
        how = legal_orientation(op, problem, device)
        if isinstance(how, str):
            refused[how] += 1
        else:
            legal[op] = how
    return legal, _counted(refused)


def _allowed(legal: Iterable[Operation], settings: Settings) -> tuple[dict[Operation, list[Axes]], list[Refusal]]:
    """The axes of each operation with which it has a name that the settings' regexes let pass; and one refusal for each reason.

    The regexes hold before the operations are ranked, so that the best of those that are left are tried, however bad. Where none is
    left, all are given: the selector refuses them for the same reasons, and warns.
    """
    passed: dict[Operation, list[Axes]] = {}
    refused: Counter[str] = Counter()
    for op in legal:
        reasons = {axes: why_not_named(_name(Config(operation=op, axes=axes)), NAME, settings) for axes in AXES}
        passed[op] = [axes for axes, reason in reasons.items() if reason is None]
        if not passed[op]:
            refused[str(reasons[AXES[0]])] += 1
    if not any(passed.values()):
        return {op: list(AXES) for op in passed}, []
    return {op: axes for op, axes in passed.items() if axes}, _counted(refused)


def _counted(refused: Counter[str]) -> list[Refusal]:
    return [Refusal(name=f"{NAME}:{count} operations", reason=reason) for reason, count in refused.most_common()]


def _name(config: Config) -> str:
    return f"{NAME}:{config.name}"


def _without_twins(found: list[Operation]) -> list[Operation]:
    """One of each group that we would make the same kernel of: the type of c, which is never read, does not matter."""
    kept: dict[Operation, Operation] = {}
    for op in sorted(found, key=lambda op: op.c != "void"):
        kept.setdefault(dataclasses.replace(op, name="", c=""), op)
    return list(kept.values())


def _choice(config: Config, problem: Problem, device: DeviceInfo, toolkit: Toolkit, *, exchanged: bool) -> CutlassChoice:
    operation, accumulator = config.operation, problem.accumulator
    return CutlassChoice(
        name=_name(config),
        backend=NAME,
        problem=problem,
        claims=Claims(
            accumulate=accumulator,
            partials=accumulator,
            epilogue_input=accumulator,
            splits=splits_of(config, problem, device),
            input_mode="tf32" if operation.a == "tf32" and problem.dtype == torch.float32 else "ieee",
        ),
        info=_info(config, exchanged=exchanged),
        config=config,
        toolkit=toolkit,
        capability=operation.introduced if operation.modern else device.capability,
        exchanged=exchanged,
    )


def _info(config: Config, *, exchanged: bool) -> dict[str, Any]:
    operation, axes = config.operation, config.axes
    info: dict[str, Any] = {"tile": list(operation.tile)}
    if operation.modern:
        # What CUTLASS calls them, without its namespaces. How many stages there are it decides when it compiles.
        schedules = (operation.kernel_schedule, operation.epilogue_schedule, operation.scheduler)
        names = [name.rsplit("::", 1)[-1] for name in schedules]
        info |= {"cluster": list(operation.cluster)} | dict(zip(("schedule", "epilogue_schedule", "scheduler"), names, strict=True))
    else:
        info |= {"stages": operation.stages, "warps": list(operation.warps)}
    splits = {"splits": axes.splits} if operation.stream_k else {}
    return info | {"raster": axes.raster, "swizzle": axes.swizzle, **splits, "exchanged": exchanged}
