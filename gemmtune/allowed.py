"""Which settings filter the choices of which backend, and what they say of a choice's name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .settings import Settings

__all__ = ["FILTERS", "FilterSettings", "why_not_allowed", "why_not_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSettings:
    """The names of the settings that filter the choices of some backends (None: of all).

    ``min_size`` and ``cap`` hold for templates alone.
    """

    backends: Collection[str] | None
    min_size: str
    allow: str
    deny: str
    cap: str

    def covers(self, backend: str) -> bool:
        """Whether the row is about the choices of that backend."""
        return self.backends is None or backend in self.backends


FILTERS: tuple[FilterSettings, ...] = (
    FilterSettings(
        backends=None,
        min_size="template_min_gemm_size",
        allow="choice_allowlist_regex",
        deny="choice_denylist_regex",
        cap="max_profiling_configs",
    ),
    FilterSettings(
        backends=("cutlass",),
        min_size="cutlass_min_gemm_size",
        allow="cutlass_op_allowlist_regex",
        deny="cutlass_op_denylist_regex",
        cap="cutlass_max_profiling_configs",
    ),
)
"""A choice has to pass every row of its backend. A backend with filters of its own has a row of its own."""


def why_not_allowed(name: str, allow: str | None, deny: str | None, names: tuple[str, str]) -> str | None:
    """Why a regex leaves out the choice of this name, or None. Empty or None filters nothing; ``names`` are the settings' names."""
    if allow and not re.search(allow, name):
        return f"{names[0]} {allow!r} is not found in the name"
    if deny and re.search(deny, name):
        return f"{names[1]} {deny!r} is found in the name"
    return None


def why_not_named(name: str, backend: str, settings: Settings, rows: Sequence[FilterSettings] = FILTERS) -> str | None:
    """Why the settings leave out the backend's choice of this name, or None."""
    for row in rows:
        if row.covers(backend):
            reason = why_not_allowed(name, getattr(settings, row.allow), getattr(settings, row.deny), (row.allow, row.deny))
            if reason is not None:
                return reason
    return None
