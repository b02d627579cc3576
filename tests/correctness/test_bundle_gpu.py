"""``gemmtune bundle`` on a GPU: kernels that one machine tuned run in an image without a compiler, and nothing is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import cli, settings
from gemmtune.dispatch.ready import forget_plans

pytestmark = pytest.mark.gpu
IMAGE = """
import sys, warnings
warnings.simplefilter("error")
import torch, gemmtune
a, b = torch.ones(1, 4096, device="cuda", dtype=torch.bfloat16), torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16).t()
assert torch.equal(gemmtune.mm(a, b), torch.full((1, 4096), 4096.0, device="cuda", dtype=torch.bfloat16))
first = str(gemmtune.explain("mm", a, b)).partition("\\n")[0]
assert f" on cuda: {sys.argv[1]}:" in first, first
"""


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the sizes and times of the files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_image_runs_kernels_of(backend, tmp_path):
    a, weight = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (1, 4096))
    b = weight.t()
    image = tmp_path / "image"
    with settings.patch(
        cache_dir=str(tmp_path / "cache"), store_path=None, backends=(backend,), search="quick", tune_in_subprocess=False
    ):
        forget_plans()
        result = gemmtune.tune("mm", a, b, progress=False)
        assert (result[0].pick or "none").startswith(f"{backend}:"), result
        assert cli.run(["bundle", "--output", str(image)]) == 0
    forget_plans()
    shutil.rmtree(tmp_path / "cache")
    before, home = contents(image), tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GEMMTUNE_", "TRITON_")) and name != "CC"}
    names = {"PATH": str(home), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    ours = {"GEMMTUNE_CACHE_DIR": str(image), "GEMMTUNE_TUNE": "never", "GEMMTUNE_BACKENDS": backend}
    done = subprocess.run(
        [sys.executable, "-c", IMAGE, backend], env=kept | names | ours, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert contents(image) == before
    assert not [path for path in home.iterdir() if path.name != ".nv"], "the driver makes that folder"
