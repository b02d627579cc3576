"""Public names: listed in the stub, imported at first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gemmtune


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in gemmtune.__all__ if getattr(gemmtune, name, None) is None] == []
    assert set(gemmtune.__all__) <= set(dir(gemmtune))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'gemmtune' has no attribute 'nothing'$"):
        _ = gemmtune.nothing  # type: ignore[attr-defined]


def test_the_first_use_of_a_name_imports_torch_and_defines_the_operators() -> None:
    program = (
        "import sys, gemmtune\n"
        "print('torch' in sys.modules)\n"
        "gemmtune.Layout\n"
        "torch = sys.modules['torch']\n"
        "print(*(str(getattr(torch.ops.gemmtune, name).default) for name in ('mm', 'bsr_mm')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["False", "gemmtune.mm.default gemmtune.bsr_mm.default"]
