"""``gemmtune choices``: what would be tried for a shape; needs no GPU and measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from .. import settings
from ..choice import Choice, Offers
from ..device import detect
from ..selector.offers import enabled_backends, offers_for
from ..selector.table import new_table, refusal_lines
from .asked import arch_of, settings_changes, spec_of
from .output import STDOUT, write_json
from .printing import show
from .shapes import problem_of_word

__all__ = ["choices"]


def choices(*, shape: str, arch: str | None, json_file: str | None, **options: Any) -> None:
    """List what would be tried for a shape. ``options`` are those for settings and for the problem."""
    device = arch_of(arch) or detect()
    changes = settings_changes(options)
    wanted = problem_of_word(shape, spec_of(device.torch_device.type, options))
    with settings.patch(**changes) as chosen:
        offers = offers_for(wanted, device, chosen, on_this_machine=arch is None)
        names = enabled_backends(device, chosen)
    if json_file != STDOUT:
        show(_parts(f"{wanted}, {device.name} ({device.arch}), backends {', '.join(names)}", offers))
    data = {
        "problem": {"text": str(wanted)} | wanted.to_json(),
        "device": {"name": device.name, "arch": device.arch},
        "choices": [_choice_json(c) for c in offers.choices],
        "refused": [{"name": r.name, "reason": r.reason, "count": r.count} for r in offers.refusals],
    }
    write_json(json_file, data)


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "backend": choice.backend,
        "baseline": choice.baseline,
        "config": dict(choice.info),
        "content_hash": choice.content_hash,
    }


def _parts(heading: str, offers: Offers) -> Iterator[RenderableType]:
    yield Text(heading, style="bold")
    table = new_table(texts=("choice", "backend"), last="config")
    for choice in offers.choices:
        table.add_row(Text(choice.name), Text(choice.backend), Text(_config(choice.info)))
    yield table if offers.choices else "no choices"
    if offers.refusals:
        yield Text(f"refused: {sum(r.count for r in offers.refusals)}", style="bold")
        yield from map(Text, refusal_lines(offers.refusals))


def _config(info: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in info.items())
