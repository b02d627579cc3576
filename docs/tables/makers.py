"""Every made part by its name."""

from __future__ import annotations

from collections.abc import Callable

from . import commands, exhaustive, facts, finetune, generation, integrations, invariant, measured, models, support

MAKERS: dict[str, Callable[[], str]] = {
    name: make
    for part in (facts, commands, exhaustive, support, measured, models, invariant, generation, finetune, integrations)
    for name, make in part.MAKERS.items()
}
