"""A backend that is added by the recipe of CONTRIBUTING.md works like the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rotation import rotated

import gemmtune
from gemmtune import cli, settings
from gemmtune.backends.table import BACKENDS, BackendRow
from gemmtune.dispatch.ready import forget_plans
from gemmtune.problem import Problem
from gemmtune.workers.pool import WORKERS

A, B = torch.randn(24, 40), torch.randn(40, 100)
PROBLEM = Problem.mm(24, 100, 40, dtype=torch.float32, layout="nn", device_type="cpu")
RIGHT = ("toy:loops_8", "toy:loops_64")


@pytest.fixture(autouse=True)
def toy(own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "toy_package"
    package.mkdir()
    shutil.copy(Path(__file__).with_name("toy_backend.py"), package / "__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    WORKERS.close()  # workers find modules where their parent found them at their start
    monkeypatch.setitem(BACKENDS, "toy", BackendRow(module="toy_package", compiles=True))
    forget_plans()
    with settings.patch(search="quick", backends=("aten", "toy")):
        yield
    forget_plans()
    WORKERS.close()


@pytest.mark.turn(2, 8)
@pytest.mark.parametrize("in_subprocess", rotated([False, True], 2, "adding a backend"))
def test_it_is_compiled_verified_raced_remembered_and_run(in_subprocess: bool):
    with settings.patch(tune_in_subprocess=in_subprocess):
        [found] = gemmtune.tune("mm", A, B, progress=False)
        outcomes = {o.name: o for o in found.outcomes}
        assert set(outcomes) == {"aten:mm", *RIGHT, "toy:loops_16_wrong"}
        assert {name for name, o in outcomes.items() if o.status == "ok" and o.time_us} == {"aten:mm", *RIGHT}
        assert outcomes["toy:loops_16_wrong"].status == "wrong_result"
        assert [(r.name, r.reason) for r in found.refusals] == [("toy:loops_512", "N = 100 is less than a block of 512")]
        assert gemmtune.tune(PROBLEM, progress=False)[0].source == "store"
    assert "toy:loops_512: N = 100 is less than a block of 512" in str(gemmtune.explain("mm", A, B))


def test_it_may_be_the_pick_and_its_kernel_runs():
    with settings.patch(choice_denylist_regex="^aten"):
        assert torch.allclose(gemmtune.mm(A, B), A @ B, atol=1e-4)
        explained = gemmtune.explain("mm", A, B)
        assert (explained.pick in RIGHT, explained.origin) == (True, "from the store")
        out = torch.empty(24, 100)
        gemmtune.mm(A, B, out=out)
        assert torch.allclose(out, A @ B, atol=1e-4)


def test_filters_and_the_command_line_know_it(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["choices", "24x100x40", "--arch", "avx2", "--dtype", "float32", "--layout", "nn", "--backends", "toy",
                    "--deny", "_64", "--json", "-"]) == 0  # fmt: skip
    data = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in data["choices"]] == ["toy:loops_8", "toy:loops_16_wrong"]
    assert {r["name"] for r in data["refused"]} == {"toy:loops_64", "toy:loops_512"}
