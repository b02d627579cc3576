"""``gemmtune report``: a page, Markdown or a picture of a store or a result, or of two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from .. import settings
from ..report import markdown, pages
from ..report.picture import draw
from ..report.replay import replay
from ..report.replay_section import replay_section
from ..report.sources import read
from .output import STDOUT, write_json
from .replay import SEARCHES, own_source

MOST_FILES = 2


def report(files: Sequence[str], html: str | None, md: str | None, png: str | None, replayed: bool, json_file: str | None) -> None:
    """Write what was asked for, or print Markdown. ``replayed`` adds a section about searches to a page."""
    if replayed and html is None:
        raise click.UsageError("--replay: expected --html too: the section is part of the page; gemmtune replay prints a table")
    if len(files) > MOST_FILES:
        raise click.UsageError(f"FILE: got {len(files)}, expected one, or two to compare")
    sources = [read(Path(file)) for file in files] or [own_source()]
    if len({source.name for source in sources}) < len(sources):
        sources = [replace(source, name=file) for source, file in zip(sources, files, strict=True)]
    if not sources[-1].entries and not sources[-1].tables:
        raise click.ClickException(f"{sources[-1].name}: got no measurement; gemmtune tune makes some")
    try:
        if html is not None:
            more = [replay_section(replay(sources[-1].known, SEARCHES, settings.current()))] if replayed else []
            Path(html).write_text(pages.report(sources, *more), encoding="utf-8")
        if md is not None:
            Path(md).write_text(markdown.report(sources), encoding="utf-8")
        if png is not None:
            draw(sources[-1], Path(png))
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from error
    written = [file for file in (html, md, png) if file is not None]
    if json_file != STDOUT:
        click.echo("\n".join(f"wrote {file}" for file in written) if written else markdown.report(sources), nl=bool(written))
    write_json(json_file, [source.to_json() for source in sources])
