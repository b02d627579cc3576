"""``gemmtune choices``: what would be tried for a shape; needs no GPU and measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from .. import settings
from ..choice import Choice, Offers
from ..device import DeviceInfo, detect
from ..selector.offers import enabled_backends, offers_for
from ..selector.table import new_table, refusal_lines
from .options import arch_option, filter_options, problem_options, search_options, settings_changes, spec_of
from .output import STDOUT, json_option, show, write_json
from .shapes import problem_of_word

__all__ = ["choices"]


@click.command()
@click.argument("shape")
@arch_option
@problem_options
@search_options
@filter_options
@json_option
def choices(
    shape: str,
    arch: DeviceInfo | None,
    backends: str | None,
    search: str | None,
    choice_allowlist_regex: str | None,
    choice_denylist_regex: str | None,
    json_file: str | None,
    **problem: Any,
) -> None:
    """List what would be tried for SHAPE, and what is refused beforehand and why.

    \b
    gemmtune choices 512x512x512 --arch sm80 --backends triton
    gemmtune choices 512x512x512 --arch sm90 --allow 'triton:mm_128x'
    """
    device = arch or detect()
    wanted = problem_of_word(shape, spec_of(device.torch_device.type, problem))
    changes = settings_changes(
        backends=backends,
        search=search,
        choice_allowlist_regex=choice_allowlist_regex,
        choice_denylist_regex=choice_denylist_regex,
    )
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
