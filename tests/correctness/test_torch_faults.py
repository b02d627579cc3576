"""Where torch itself makes NaN of an infinity, verification says so and no pick does: what stays is the plain call of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import process
from torch_faults import makes_nan_of_infinity

import gemmtune
from gemmtune import Problem, settings

WITHOUT_BF16 = "AVX512_CORE_VNNI"
"""oneDNN's name for processors with AVX-512 that have no instructions for bfloat16: those whose products have the fault."""


def found_of_torch(store: Path) -> dict[str, Any]:
    """What tuning finds of torch's own choices, and whether calls go on."""
    with settings.patch(backends=("aten",), store_path=str(store), tune_in_subprocess=False):
        [result] = gemmtune.tune(Problem.mm(33, 40, 129, dtype=torch.bfloat16, device_type="cpu"), progress=False)
        a, b = torch.ones(33, 129, dtype=torch.bfloat16), torch.ones(40, 129, dtype=torch.bfloat16).t()
        called = torch.equal(gemmtune.mm(a, b), a @ b)
    said = [(o.name, str(o.status), o.reason) for o in result.outcomes]
    return {"faulty": makes_nan_of_infinity(), "pick": result.pick, "outcomes": said, "called": called}


def run(store: Path, isa: str | None) -> dict[str, Any]:
    if isa is None:
        return found_of_torch(store)
    with process(ONEDNN_MAX_CPU_ISA=isa) as other:
        return other(found_of_torch, store)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("isa", [None, WITHOUT_BF16], ids=["this processor", "one without bfloat16"])
def test_no_pick_has_the_fault_and_calls_go_on(tmp_path: Path, isa: str | None) -> None:
    found = run(tmp_path / "store.sqlite", isa)
    assert found["called"]
    assert (found["pick"] is None) == found["faulty"]
    for name, status, reason in found["outcomes"]:
        assert status == ("wrong_result" if found["faulty"] else "ok"), name
        assert "nan, expected" in reason or not found["faulty"]
