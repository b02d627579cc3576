"""How long it takes to list CUTLASS's operations from nothing, which the first enumeration waits for."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gemmtune import settings
from gemmtune.backends.cutlass.toolkit import find_toolkit, operations

pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")

LIMIT_S = 3.0
"""Of a processor, not of the clock: other work on the machine does not count."""


@pytest.mark.rotates(8)
@pytest.mark.parametrize("element", ["bf16", "f16", "tf32", "s8"])
def test_the_longest_lists(element: str, tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path)):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = operations(find_toolkit(None), 90, element)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(found) > 100
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMIT_S
