"""``gemmtune explain``: the choice that a call of a shape runs, and the reasons."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from .. import settings
from ..tuning.explain import explain_problem
from .asked import device_of, settings_changes
from .output import STDOUT, write_json
from .printing import show
from .shapes import problem_of_word
from .spec import Spec


def explain(*, shape: str, device: str | None, json_file: str | None, **options: Any) -> None:
    """Explain a call of a shape. ``options`` hold those for settings and for the problem."""
    info = device_of(device)
    changes = settings_changes(options)
    problem = problem_of_word(shape, Spec(device_type=info.torch_device.type, **options))
    with settings.patch(**changes):
        explained = explain_problem(problem, info)
    if json_file != STDOUT:
        show([Text(str(explained))])
    write_json(json_file, explained.to_json())
