"""``gemmtune choices``: what would be tried for a shape; needs no GPU and measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from .. import settings
from ..choice import Choice, Offers
from ..device import PRESETS, detect, preset
from ..selector.offers import enabled_backends, offers_for
from .options import problem_options, search_options, settings_changes, spec_of
from .output import STDOUT, console, json_option, write_json
from .shapes import problem_of_word

__all__ = ["choices"]


@click.command()
@click.argument("shape")
@click.option("--arch", metavar="ARCH", help=f"One of {', '.join(PRESETS)}; this machine's device when not given.")
@problem_options
@search_options
@json_option
def choices(shape: str, arch: str | None, backends: str | None, search: str | None, json_file: str | None, **problem: Any) -> None:
    """List what would be tried for SHAPE, and what is refused beforehand and why.

    \b
    gemmtune choices 512x512x512 --arch sm80 --backends triton
    """
    device = preset(arch) if arch else detect()
    wanted = problem_of_word(shape, spec_of(device.torch_device.type, problem))
    with settings.patch(**settings_changes(backends=backends, search=search)) as chosen:
        offers = offers_for(wanted, device, chosen, on_this_machine=arch is None)
        names = enabled_backends(device, chosen)
    if json_file != STDOUT:
        _print(f"{wanted}, {device.name} ({device.arch}), backends {', '.join(names)}", offers)
    data = {
        "problem": {"text": str(wanted)} | wanted.to_json(),
        "device": {"name": device.name, "arch": device.arch},
        "choices": [_choice_json(c) for c in offers.choices],
        "refused": [{"name": r.name, "reason": r.reason} for r in offers.refusals],
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


def _print(heading: str, offers: Offers) -> None:
    out = console()
    out.print(Text(heading, style="bold"))
    if offers.choices:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("choice", overflow="fold")
        table.add_column("backend", no_wrap=True)
        table.add_column("config", overflow="fold")
        for choice in offers.choices:
            table.add_row(Text(choice.name), Text(choice.backend), Text(_config(choice.info)))
        out.print(table)
    else:
        out.print("no choices")
    if offers.refusals:
        out.print(Text(f"refused: {len(offers.refusals)}", style="bold"))
        for refusal in offers.refusals:
            out.print(Text(f"  {refusal.name}: {refusal.reason}"))


def _config(info: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in info.items())
