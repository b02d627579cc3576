"""Public names, which the stub lists. ``test_imports.py`` tests that they are imported at first use."""

from __future__ import annotations

import pytest

import gemmtune


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in gemmtune.__all__ if getattr(gemmtune, name, None) is None] == []
    assert set(gemmtune.__all__) <= set(dir(gemmtune))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'gemmtune' has no attribute 'nothing'$"):
        _ = gemmtune.nothing  # type: ignore[attr-defined]
