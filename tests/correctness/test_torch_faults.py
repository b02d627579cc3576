"""Where torch itself makes NaN of an infinity, verification says so and no pick does: what stays is the plain call of torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WITHOUT_BF16 = "AVX512_CORE_VNNI"
"""oneDNN's name for processors with AVX-512 that have no instructions for bfloat16: those whose products have the fault."""
PROGRAM = """
import json, sys
import torch
from torch_faults import makes_nan_of_infinity
import gemmtune
from gemmtune import Problem, settings

with settings.patch(backends=("aten",), store_path=sys.argv[1], tune_in_subprocess=False):
    found = gemmtune.tune(Problem.mm(33, 40, 129, dtype=torch.bfloat16, device_type="cpu"))
    a, b = torch.ones(33, 129, dtype=torch.bfloat16), torch.ones(40, 129, dtype=torch.bfloat16).t()
    called = torch.equal(gemmtune.mm(a, b), a @ b)
result = found[0]
said = [[o.name, o.status, o.reason] for o in result.outcomes]
print(json.dumps({"faulty": makes_nan_of_infinity(), "pick": result.pick, "outcomes": said, "called": called}))
"""


def run(folder: Path, isa: str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    arguments = ["-c", str(folder / "store.sqlite")]
    if isa is None:
        monkeypatch.setattr(sys, "argv", arguments)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(PROGRAM, {})
        return json.loads(printed.getvalue().splitlines()[-1])
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, arguments[1]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("isa", [None, WITHOUT_BF16], ids=["this processor", "one without bfloat16"])
def test_no_pick_has_the_fault_and_calls_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str | None) -> None:
    found = run(tmp_path, isa, monkeypatch)
    assert found["called"]
    assert (found["pick"] is None) == found["faulty"]
    for name, status, reason in found["outcomes"]:
        assert status == ("wrong_result" if found["faulty"] else "ok"), name
        assert "nan, expected" in reason or not found["faulty"]
