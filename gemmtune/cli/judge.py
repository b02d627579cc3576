"""``gemmtune judge``: values, speed and conduct of a GEMM that nobody vouches for.

Exit status: 0 right and honest, 1 wrong or dishonest, 2 not judged.
"""

from typing import Any

import click
from rich.text import Text

from ..conformance.options import declared_by
from ..conformance.runs.files import write
from ..errors import raised_as
from ..judging.report import as_html, as_json, lines
from ..judging.verdict import judge as judged
from .output import CouldNotTest
from .printing import answer


def judge(*, target: str, trait: tuple[str, ...], json_file: str | None, html: str | None, **options: Any) -> None:
    """Judge a GEMM, print the verdict and exit with its status."""
    with raised_as(CouldNotTest):
        judgement = judged(target, declared=declared_by(trait), **options)
        if html is not None:
            write("html", html, as_html(judgement))
    answer(json_file, as_json(judgement), map(Text, lines(judgement)))
    if judgement.exit_status:
        raise click.exceptions.Exit(judgement.exit_status)
