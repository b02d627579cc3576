"""``gemmtune build``: compile ahead of time the kernels that tuning would compile. Needs the compilers and no GPU."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from .. import settings
from ..backends.table import TEMPLATES, load
from ..choice import Choice, Refusal
from ..device import DeviceInfo, detect
from ..problem import Problem
from ..selector.offers import enabled_backends
from ..selector.precompile import Compilation
from ..selector.progress import Progress
from ..selector.table import refusal_lines
from ..selector.text_table import counted
from ..selector.trials import devices_like, tried_offers
from ..settings import Settings
from .asked import arch_of, refuse_if_disabled, settings_changes
from .printing import answer, watched
from .shapes import some_problems_of
from .spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Kernel that was not built, or backend that cannot compile here. ``problem`` is empty for a backend."""

    name: str
    problem: str
    reason: str

    def __str__(self) -> str:
        what = f"{self.name} for {self.problem}" if self.problem else self.name
        return f"- {what}: " + self.reason.replace("\n", "\n    ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Result of a build, in numbers of distinct kernels."""

    compiled: int
    present: int
    """Kernels that were already in the cache folder."""
    failures: tuple[Failure, ...]
    refusals: tuple[Refusal, ...]
    seconds: float


def build(*, shapes: tuple[str, ...], shapes_file: str | None, arch: str | None, json_file: str | None, **options: Any) -> int:
    """Compile the kernels that tuning each shape would compile. ``options`` hold those for settings and for problems."""
    refuse_if_disabled()
    device = arch_of(arch) or detect()
    changes = settings_changes(options)
    problems = some_problems_of(shapes, shapes_file, Spec(device_type=device.torch_device.type, **options))
    with settings.patch(**changes) as chosen:
        enabled = enabled_backends(device, chosen)
        names = tuple(name for name in enabled if name in TEMPLATES)
        if not names:
            expected = f"expected one that compiles kernels: {', '.join(sorted(TEMPLATES))}"
            raise click.UsageError(f"--backends: got {', '.join(enabled)}, {expected}")
        kept = f"every kernel that was compiled is kept in {chosen.folder}"
        with settings.patch(backends=names) as restricted, watched(kept=lambda: kept) as progress:
            built = _build(problems, device, restricted, progress)
    backends = ", ".join(f"{name} ({load(name).available(device).detail})" for name in names)
    heading = f"{counted(len(problems), 'shape')} for {device.name} ({device.arch}), backends {backends}"
    data = {
        "device": {"name": device.name, "arch": device.arch},
        "backends": list(names),
        "problems": [str(problem) for problem in problems],
        "cache_folder": str(chosen.folder),
        "compiled": built.compiled,
        "present": built.present,
        "seconds": built.seconds,
        "failed": [dataclasses.asdict(failure) for failure in built.failures],
    }
    answer(json_file, data, _parts(heading, built, chosen))
    return 1 if built.failures else 0


def _build(problems: Sequence[Problem], device: DeviceInfo, chosen: Settings, progress: Progress) -> Built:
    begun = time.monotonic()
    seen = {name: load(name).available(device) for name in enabled_backends(device, chosen)}
    failures = [Failure(name=name, problem="", reason=found.detail) for name, found in seen.items() if not found.ok]
    # Collect the distinct kernels of all problems.
    kernels: dict[str, Choice] = {}
    refusals: list[Refusal] = []
    for problem, like in itertools.product(problems, devices_like(device, chosen)):
        offers = tried_offers(problem, like, chosen, on_this_machine=False)
        kernels |= {c.compile_key: c for c in offers.choices if c.compile_key and c.compile_key not in kernels}
        refusals += offers.refusals
    # Separate kernels that exist, that cannot be made, and that can be compiled.
    able = [choice for choice in kernels.values() if seen[choice.backend].ok]
    waiting = [choice for choice in able if not choice.compiled]
    for choice in waiting:
        if choice.obstacle is not None:
            failures.append(Failure(name=choice.name, problem=str(choice.problem), reason=choice.obstacle))
    possible = [choice for choice in waiting if choice.obstacle is None]
    # Compile in parallel and record each failure.
    with Compilation(possible, chosen) as compilation:
        compilation.wait(possible, functools.partial(progress.stage, "compile"))
        for choice in possible:  # one by one, because choices of several problems may have the same name
            for failure in compilation.wait([choice]).values():
                reason = f"{failure.status.value}: {failure.reason}"
                failures.append(Failure(name=choice.name, problem=str(choice.problem), reason=reason))
    return Built(
        compiled=sum(choice.compiled for choice in waiting),
        present=len(able) - len(waiting),
        failures=tuple(failures),
        refusals=tuple(refusals),
        seconds=time.monotonic() - begun,
    )


def _parts(heading: str, built: Built, chosen: Settings) -> Iterator[RenderableType]:
    yield Text(heading, style="bold")
    done = f"{counted(built.compiled, 'kernel')} compiled in {built.seconds:.1f} s, {built.present} already present"
    yield Text(f"{done}; in {chosen.folder}")
    if built.refusals and not (built.compiled or built.present or built.failures):
        yield Text("refused:", style="bold")
        yield from map(Text, refusal_lines(built.refusals))
    if built.failures:
        yield Text(f"failed: {len(built.failures)}", style="bold red")
        yield from (Text(str(failure)) for failure in built.failures)
