"""Files of TunableOp, which torch on a GPU reads and writes in processes without gemmtune."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import Problem, cli, settings
from gemmtune.cli.shapes import problems_of_file
from gemmtune.cli.spec import Spec

pytestmark = pytest.mark.gpu
PRODUCTS = """
import json, sys
import torch
from torch.cuda import tunable

def product(*shape, dtype):
    *batch, m, n, k = shape
    a = torch.randn(*batch, m, k, device="cuda", dtype=dtype)
    b = torch.randn(*batch, n, k, device="cuda", dtype=dtype).mT
    expected = a.double().cpu() @ b.double().cpu()  # on a CPU, where nothing is tuned
    return float(((a @ b).double().cpu() - expected).abs().max() / expected.abs().max())

def products():
    return product(16, 64, 32, dtype=torch.bfloat16), product(3, 16, 64, 32, dtype=torch.float16)

def results():
    return [list(x) for x in tunable.get_results()]
"""
READING = """
tunable.enable(True)
tunable.tuning_enable(False)
read = [tunable.read_file(file) for file in sys.argv[1:]]
known, errors = results(), products()
tunable.tuning_enable(True)
products()
print(json.dumps({"read": read, "known": known, "errors": errors, "later": results()}))
"""
WRITING = """
tunable.enable(True)
tunable.tuning_enable(False)
tunable.record_untuned_enable(True)
products()
tunable.record_untuned_enable(False)
tunable.tuning_enable(True)
print(json.dumps({"errors": products()}))
"""


def ran(program: str, folder: Path, *files: Path) -> dict[str, Any]:
    """Run a program of torch alone in ``folder``. Return what it printed."""
    variables = {name: x for name, x in os.environ.items() if not name.startswith("PYTORCH_TUNABLEOP_")}
    command = [sys.executable, "-c", PRODUCTS + program, *map(str, files)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_torch_reads_our_file_and_tunes_none_of_its_products(own_store: Path, tmp_path: Path) -> None:
    with settings.patch(backends=("aten",), search="quick"):
        for op, batch, dtype in (("mm", (), torch.bfloat16), ("bmm", (3,), torch.float16)):
            a, b = (torch.randn(*batch, rows, 32, device="cuda", dtype=dtype) for rows in (16, 64))
            gemmtune.tune(op, a, b.mT, progress=False)
    ours, others = tmp_path / "ours.csv", tmp_path / "others.csv"
    assert cli.run(["export", str(ours), "--format", "tunableop"]) == 0
    lines = ours.read_text().splitlines()
    versions = ["Validator,PT_VERSION,0.0.0" if line.startswith("Validator,PT_VERSION,") else line for line in lines]
    others.write_text("\n".join(versions) + "\n")
    found = ran(READING, tmp_path, others, ours)
    assert found["read"] == [False, True], "torch takes a file of its own version alone"
    rows = [line.split(",") for line in lines if not line.startswith("Validator,")]
    assert len(rows) == 2
    assert sorted(x[:3] for x in found["known"]) == sorted(row[:3] for row in rows)
    assert sorted(x[3] for x in found["known"]) == pytest.approx(sorted(float(row[3]) for row in rows), rel=1e-4)
    assert max(found["errors"]) < 0.01
    assert found["later"] == found["known"], "torch tuned a product of the file again"


def test_we_read_the_files_that_torch_writes(tmp_path: Path) -> None:
    assert max(ran(WRITING, tmp_path)["errors"]) < 0.01
    gpu = Spec(device_type="cuda")
    expected = {Problem.mm(16, 64, 32, layout="nt", device_type="cuda")}
    expected |= {Problem.bmm(3, 16, 64, 32, dtype=torch.float16, layout="nt", device_type="cuda")}
    for name in ("results", "untuned"):
        [file] = tmp_path.glob(f"tunableop_{name}*.csv")
        problems, skipped = problems_of_file(str(file), gpu)
        assert not skipped
        assert set(problems) == expected, file.read_text()
