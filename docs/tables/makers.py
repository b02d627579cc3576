"""Every made part by its name."""

from __future__ import annotations

from collections.abc import Callable

from . import commands, facts, measured, models, support

MAKERS: dict[str, Callable[[], str]] = {**facts.MAKERS, **commands.MAKERS, **support.MAKERS, **measured.MAKERS, **models.MAKERS}
