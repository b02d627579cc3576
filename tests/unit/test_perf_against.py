"""Two installations compared: each runs its own kernels, this one measures both."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import settings
from gemmtune.device import detect
from gemmtune.errors import GateError
from gemmtune.perf_gate.against import Installation, PairOfProcesses
from gemmtune.perf_gate.processes import Failed
from gemmtune.perf_gate.sampling import ProcessSample, Sampling
from gemmtune.problem import Problem
from gemmtune.workers.worker import Elsewhere

CPU = detect("cpu")
PROBLEM = Problem.mm(96, 160, 192, dtype=torch.float32, device_type="cpu")
BATCHED = Problem.bmm(2, 16, 16, 16, dtype=torch.float32, device_type="cpu")
ONCE = "        function(a, b, out=out)\n"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkout of an older version, without this gate, whose torch.mm takes nine times as long and whose torch.bmm fails."""
    package = tmp_path / "other" / "gemmtune"
    shutil.copytree(Path(gemmtune.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "conformance", "cli"))
    (package / "version.py").write_text('__version__ = "0.0.9"\n')
    aten = package / "backends" / "aten" / "dense.py"
    source = aten.read_text()
    assert source.count(ONCE) == 1
    fails = "        if a.dim() == 3:\n            raise ValueError('no batches here')\n"
    aten.write_text(source.replace(ONCE, fails + 9 * ONCE))
    return package.parent


@pytest.mark.slow
def test_each_installation_runs_its_own_kernels(other, own_store, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads that wait for each other tell nothing on a machine at work
    installation = Installation.at(str(other))
    assert (installation.version, installation.path) == ("0.0.9", str(other))
    sampling = Sampling(blocks=6, least_blocks=6, warm_up_s=0.02)
    with settings.patch(backends=("aten",)) as chosen:
        assert installation.picks([PROBLEM], CPU, chosen) == ["aten:mm"]
        pair = PairOfProcesses(installation=installation, device=CPU, settings=chosen, sampling=sampling)
        failed, sample = pair([BATCHED, PROBLEM], 0)
    assert isinstance(failed, Failed)
    assert failed.reason == f"{other}: ValueError: no batches here"
    assert isinstance(sample, ProcessSample)
    assert sample.blocks == 6
    assert sample.log_ratio < -math.log(2)


def test_settings_that_another_process_does_not_have_by_itself(tmp_path):
    installation = Installation(path="/somewhere", version="0.0.9")
    with settings.patch(backends=("aten",), search="quick", cache_dir=str(tmp_path), store_path=str(tmp_path / "s")) as chosen:
        changes = installation.changes(chosen)
    assert changes["backends"] == ("aten",)
    assert changes["search"] == "quick"
    assert "timing" not in changes
    assert Path(changes["cache_dir"]).parent == tmp_path / "against"
    assert (changes["store_path"], changes["tune"]) == (None, "on_miss")


def test_a_folder_without_an_installation(tmp_path):
    with pytest.raises(GateError, match=r"which has no gemmtune/__init__\.py; expected a checkout or a site-packages folder"):
        Installation.at(str(tmp_path))


def test_an_installation_that_cannot_be_imported(tmp_path):
    (tmp_path / "gemmtune").mkdir()
    (tmp_path / "gemmtune" / "__init__.py").write_text("raise ImportError('half installed')")
    with pytest.raises(GateError, match="cannot be used: ImportError: half installed"):
        Installation.at(str(tmp_path))


def test_elsewhere_is_nothing_to_call_here():
    with pytest.raises(TypeError, match=r"expected one through Worker\.call"):
        Elsewhere("selector.timing.timer:median_margin")([1.0])
