"""Settings that came from another process, put in force."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager

from .. import settings as settings_module
from ..settings import Settings

__all__ = ["applied"]


def applied(settings: Settings) -> AbstractContextManager[Settings]:
    """A block in which ``settings.current()`` equals ``settings``."""
    return settings_module.patch(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})
