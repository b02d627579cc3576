"""The matrix of one architecture: all its choices, compiled, inspected, run if possible, and reported."""

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from ..backends.table import TEMPLATES, load
from ..choice import Status
from ..device import DeviceInfo, preset
from ..errors import UnavailableError
from ..problem import Problem
from ..selector.offers import enabled_backends, offers_for
from ..selector.progress import Progress
from ..settings import Search, Settings, current
from ..toolchain.compiled import CompiledChoice
from .inspection import Inspection, inspect_choices
from .problems import matrix_problems
from .report import MatrixReport, Ran, Runner, how_to_run

__all__ = ["ARCHITECTURES", "MatrixReport", "Ran", "matrix_choices", "run_matrix"]

ARCHITECTURES = ("sm75", "sm80", "sm90", "sm100", "gfx90a", "gfx942")
"""Architectures for which the matrix is kept clean. gfx90a and gfx942 are compiled and never run."""


def matrix_choices(
    arch: str,
    search: Search = "default",
    *,
    problems: Mapping[str, Problem] | None = None,
    most: int | None = None,
    settings: Settings | None = None,
) -> tuple[CompiledChoice, ...]:
    """Return the choices that a search offers for an architecture, one for each distinct compilation, grouped by problem.

    Args:
        problems: None for ``matrix_problems()``.
        most: maximum number for one problem, spread evenly over all its choices.
        settings: settings with the backends and filters. None for the current ones.

    Raises:
        UnavailableError: an unknown architecture, or no backend here that compiles our kernels for it.
    """
    return _enumerate(arch, search, problems, most, settings or current())[0]


def _enumerate(
    arch: str, search: Search, problems: Mapping[str, Problem] | None, most: int | None, settings: Settings
) -> tuple[tuple[CompiledChoice, ...], tuple[str, ...]]:
    """Return the choices of ``matrix_choices``, and a line for everything left out, with the reason."""
    device = preset(arch)
    searched = dataclasses.replace(settings, search=search)
    able, left_out = _backends(device, searched)
    searched = dataclasses.replace(searched, backends=able)
    seen: set[str] = set()
    opaque: Counter[str] = Counter()
    chosen: list[CompiledChoice] = []
    for problem in (matrix_problems() if problems is None else problems).values():
        new: dict[str, CompiledChoice] = {}
        for choice in offers_for(problem, device, searched, on_this_machine=False).choices:
            key = choice.compile_key
            if key is None or key in seen:
                continue
            if isinstance(choice, CompiledChoice):
                new.setdefault(key, choice)
            else:
                seen.add(key)
                opaque[choice.backend] += 1
        taken = list(new.items())
        if most is not None and len(taken) > most:  # at equal distances, with the first and the last
            step = (len(taken) - 1) / max(most - 1, 1)
            taken = [taken[round(i * step)] for i in range(most)]
        seen.update(key for key, _ in taken)
        chosen += [choice for _, choice in taken]
    left_out += tuple(f"{name}: {count} kernels that cannot be inspected" for name, count in sorted(opaque.items()))
    return tuple(chosen), left_out


def _backends(device: DeviceInfo, settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the enabled backends that compile our kernels for this device, and a line for each that cannot here."""
    named = [name for name in enabled_backends(device, settings) if name in TEMPLATES]
    here = {name: load(name).available(device) for name in named}
    able = tuple(name for name, availability in here.items() if availability.ok)
    unable = tuple(f"{name}: {availability.detail}" for name, availability in here.items() if not availability.ok)
    if not able:
        why = "; ".join(unable) or "enable triton (settings.backends)"
        raise UnavailableError(f"{device.arch}: no enabled backend compiles kernels for it here; {why}")
    return able, unable


def run_matrix(
    arch: str,
    *,
    search: Search = "default",
    device: DeviceInfo | None = None,
    run: bool = False,
    problems: Mapping[str, Problem] | None = None,
    most: int | None = None,
    progress: Progress | None = None,
) -> MatrixReport:
    """Compile and inspect every choice of an architecture. With ``run``, verify each compiled one on ``device``.

    ``device`` is the present GPU, or None. If it cannot run these kernels, the report has the reason, and with ``run`` that is a
    failure. ``search``, ``problems`` and ``most`` are those of ``matrix_choices``. Raises UnavailableError for an unknown
    architecture, or without a compiler for it.
    """
    begun = time.monotonic()
    settings = current()
    listener = progress or Progress()
    choices, left_out = _enumerate(arch, search, problems, most, settings)
    inspections = []
    listener.stage(f"{arch} compile", 0, len(choices))
    for inspection in inspect_choices(choices, settings):
        inspections.append(inspection)
        listener.stage(f"{arch} compile", len(inspections), len(choices))
    way = how_to_run(arch, device)
    ran: tuple[Ran, ...] = ()
    if run and way.mode is not None and device is not None:
        ran = _run(list(zip(choices, inspections, strict=True)), device, settings, listener)
    backends = sorted({choice.backend for choice in choices})
    return MatrixReport(
        arch=arch,
        search=search,
        toolchains=tuple(load(name).available(preset(arch)).detail for name in backends),
        problems=len({choice.problem for choice in choices}),
        left_out=left_out,
        inspections=tuple(inspections),
        way=way,
        device="" if device is None else f"{device.name} ({device.arch})",
        run=run,
        ran=ran,
        seconds=time.monotonic() - begun,
    )


def _run(
    inspected: Sequence[tuple[CompiledChoice, Inspection]], device: DeviceInfo, settings: Settings, listener: Progress
) -> tuple[Ran, ...]:
    able = [(choice, inspection) for choice, inspection in inspected if inspection.status is Status.OK]
    ran: list[Ran] = []
    listener.stage("run", 0, len(able))
    with Runner(device, settings) as runner:
        for choice, inspection in able:
            # A newer GPU may have less shared memory.
            result = device.why_no_smem(inspection.shared_bytes or 0) or runner.run(choice)
            ran.append(Ran(choice=choice.name, problem=str(choice.problem), result=result))
            listener.stage("run", len(ran), len(able))
    return tuple(ran)
