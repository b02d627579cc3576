"""``gemmtune choices`` and ``explain``: the choices for a shape, and the one that a call runs. They measure nothing."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from .. import settings
from ..choice import Offers
from ..device import detect
from ..problem import Problem
from ..report.names import problem_text
from ..selector.offers import enabled_backends
from ..selector.table import refusal_lines
from ..selector.text_table import TextTable
from ..selector.trials import tried_offers
from ..settings import Settings
from ..store.key import fingerprint_text
from ..store.store import open_store
from ..tuning.explain import explain_problem
from .asked import arch_of, device_of, refuse_if_disabled, settings_changes
from .files import STDOUT
from .output import write_json
from .printing import answer, show
from .selection import Selection
from .shapes import problem_of_word
from .spec import Spec

MOST_OTHERS = 3
"""Measured problems of the same sizes that ``explain`` names."""


def choices(*, shape: str, arch: str | None, json_file: str | None, **options: Any) -> None:
    """List the choices that tuning a shape would try. ``options`` hold those for settings and for the problem."""
    refuse_if_disabled()
    device = arch_of(arch) or detect()
    changes = settings_changes(options)
    wanted = problem_of_word(shape, Spec(device_type=device.torch_device.type, **options))
    with settings.patch(**changes) as chosen:
        offers = tried_offers(wanted, device, chosen, on_this_machine=arch is None)
        names = enabled_backends(device, chosen)
    data = {
        "problem": {"text": str(wanted)} | wanted.to_json(),
        "device": {"name": device.name, "arch": device.arch},
        "choices": [
            {"name": c.name, "backend": c.backend, "baseline": c.baseline, "config": dict(c.info), "content_hash": c.content_hash}
            for c in offers.choices
        ],
        "refused": [{"name": r.name, "reason": r.reason, "count": r.count} for r in offers.refusals],
    }
    answer(json_file, data, _parts(f"{wanted}, {device.name} ({device.arch}), backends {', '.join(names)}", offers))


def explain(*, shape: str, device: str | None, json_file: str | None, **options: Any) -> None:
    """Explain a call of a shape. ``options`` hold those for settings and for the problem."""
    info = device_of(device)
    changes = settings_changes(options)
    problem = problem_of_word(shape, Spec(device_type=info.torch_device.type, **options))
    with settings.patch(**changes) as chosen:
        explained = explain_problem(problem, info)
    if json_file != STDOUT:
        show([Text(str(explained))])
        if not explained.outcomes and (others := _others(problem, fingerprint_text(info, chosen.timing), chosen)):
            more = f" and {len(others) - MOST_OTHERS} more (gemmtune show {shape})" if others[MOST_OTHERS:] else ""
            show([Text(f"   measured of this shape: {', '.join(others[:MOST_OTHERS])}{more}")])
    write_json(json_file, explained.to_json())


def _others(problem: Problem, machine: str, chosen: Settings) -> list[str]:
    """Return what the store has of the sizes of a problem, with another operation, dtype or layout."""
    batched = (problem.batch,) if problem.batched else ()
    wanted = Selection(shapes=((*batched, problem.m, problem.n, problem.k),))
    keys = (key for key in open_store(chosen).keys(machine) if key != problem.key and wanted.has(key, machine))
    return sorted(map(problem_text, keys))


def _parts(heading: str, offers: Offers) -> Iterator[RenderableType]:
    yield Text(heading, style="bold")
    table = TextTable(texts=("choice", "backend"), last="config", optional=("backend",))
    for choice in offers.choices:
        config = " ".join(f"{key}={value}" for key, value in choice.info.items())
        table.add_row(Text(choice.name), Text(choice.backend), Text(config))
    yield table if offers.choices else "no choices"
    if offers.refusals:
        yield Text(f"refused: {sum(r.count for r in offers.refusals)}", style="bold")
        yield from map(Text, refusal_lines(offers.refusals))
