"""``gemmtune build``: compile ahead of time what tuning would compile; needs the compilers and no GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
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
from ..selector.offers import enabled_backends, offers_for
from ..selector.precompile import Compilation
from ..selector.progress import Progress, Silent, progress_for
from ..selector.table import refusal_lines
from ..settings import Settings
from .asked import arch_of, settings_changes, spec_of
from .output import INTERRUPTED, STDOUT, note, write_json
from .printing import show
from .shapes import problems_of

__all__ = ["build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A kernel that is not there, or a backend that compiles nothing here; ``problem`` is empty for a backend."""

    name: str
    problem: str
    reason: str

    def __str__(self) -> str:
        what = f"{self.name} for {self.problem}" if self.problem else self.name
        return f"- {what}: " + self.reason.replace("\n", "\n    ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build came to, in numbers of distinct kernels."""

    compiled: int
    present: int
    """Kernels that were in the cache folder before."""
    failures: tuple[Failure, ...]
    refusals: tuple[Refusal, ...]
    seconds: float


def build(
    *, shapes: tuple[str, ...], shapes_file: str | None, arch: str | None, quiet: bool, json_file: str | None, **options: Any
) -> int:
    """Compile what the tuning of each shape would. ``options`` are those for settings and for problems."""
    device = arch_of(arch) or detect()
    changes = settings_changes(options)
    problems = problems_of(shapes, shapes_file, spec_of(device.torch_device.type, options))
    with settings.patch(**changes) as chosen:
        names = _backends(device, chosen)
        with settings.patch(backends=names) as restricted:
            progress = Silent() if quiet else progress_for()
            try:
                built = _build(problems, device, restricted, progress)
            except KeyboardInterrupt:
                progress.close()
                note(f"interrupted: what was compiled is kept in {chosen.folder}")
                raise click.exceptions.Exit(INTERRUPTED) from None
            finally:
                progress.close()
    if json_file != STDOUT:
        backends = ", ".join(f"{name} ({load(name).available(device).detail})" for name in names)
        heading = f"{_count(len(problems), 'shape')} for {device.name} ({device.arch}), backends {backends}"
        show(_parts(heading, built, chosen))
    write_json(json_file, _json(built, device, names, problems, chosen))
    return 1 if built.failures else 0


def _backends(device: DeviceInfo, chosen: Settings) -> tuple[str, ...]:
    """The enabled backends that compile kernels."""
    names = tuple(name for name in enabled_backends(device, chosen) if name in TEMPLATES)
    if not names:
        enabled = ", ".join(enabled_backends(device, chosen))
        raise click.UsageError(f"--backends: got {enabled}, expected one that compiles kernels: {', '.join(sorted(TEMPLATES))}")
    return names


def _build(problems: Sequence[Problem], device: DeviceInfo, chosen: Settings, progress: Progress) -> Built:
    begun = time.monotonic()
    failures = [_unavailable(name, device) for name in enabled_backends(device, chosen)]
    missing = {failure.name for failure in failures if failure}
    kernels: dict[str, Choice] = {}
    refusals: list[Refusal] = []
    for problem in problems:
        offers = offers_for(problem, device, chosen, on_this_machine=False)
        kernels |= {c.compile_key: c for c in offers.choices if c.compile_key and c.compile_key not in kernels}
        refusals += offers.refusals
    able = [choice for choice in kernels.values() if choice.backend not in missing]
    waiting = [choice for choice in able if not choice.compiled]
    failed = [failure for failure in failures if failure] + list(_compile(waiting, chosen, progress))
    return Built(
        compiled=sum(choice.compiled for choice in waiting),
        present=len(able) - len(waiting),
        failures=tuple(failed),
        refusals=tuple(refusals),
        seconds=time.monotonic() - begun,
    )


def _unavailable(name: str, device: DeviceInfo) -> Failure | None:
    available = load(name).available(device)
    return None if available.ok else Failure(name=name, problem="", reason=available.detail)


def _compile(choices: Iterable[Choice], chosen: Settings, progress: Progress) -> Iterator[Failure]:
    """Compile the choices, as many at a time as the settings say, and tell those that failed."""
    able: list[Choice] = []
    for choice in choices:
        if choice.obstacle is None:
            able.append(choice)
        else:
            yield Failure(name=choice.name, problem=str(choice.problem), reason=choice.obstacle)
    with Compilation(able, chosen) as compilation:
        compilation.wait(able, lambda done, total: progress.stage("compile", done, total))
        for choice in able:
            for failure in compilation.wait([choice]).values():
                yield Failure(name=choice.name, problem=str(choice.problem), reason=f"{failure.status.value}: {failure.reason}")


def _parts(heading: str, built: Built, chosen: Settings) -> Iterator[RenderableType]:
    yield Text(heading, style="bold")
    done = f"{_count(built.compiled, 'kernel')} compiled in {built.seconds:.1f} s, {built.present} were there"
    yield Text(f"{done}; in {chosen.folder}")
    if built.refusals and not (built.compiled or built.present or built.failures):
        yield Text("refused:", style="bold")
        yield from map(Text, refusal_lines(built.refusals))
    if built.failures:
        yield Text(f"failed: {len(built.failures)}", style="bold red")
        yield from (Text(str(failure)) for failure in built.failures)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _json(built: Built, device: DeviceInfo, names: Sequence[str], problems: Sequence[Problem], chosen: Settings) -> dict[str, Any]:
    return {
        "device": {"name": device.name, "arch": device.arch},
        "backends": list(names),
        "problems": [str(problem) for problem in problems],
        "cache_folder": str(chosen.folder),
        "compiled": built.compiled,
        "present": built.present,
        "seconds": built.seconds,
        "failed": [{"name": f.name, "problem": f.problem, "reason": f.reason} for f in built.failures],
    }
