"""Processes for untrusted GEMMs of all tests of this folder: each start imports torch, so they live as long as the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmtune.untrusted.process import close_all


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    yield
    close_all()
