"""Compiled graphs from a cache run in processes that did not compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved_graphs
from cpp_kernels import needs_compiler

import gemmtune
from gemmtune.version import __version__

pytestmark = [needs_compiler, pytest.mark.slow]
SETTINGS = {"BACKENDS": "cpp", "SEARCH": "quick", "MAX_PROFILING_CONFIGS": "1", "TUNE_IN_SUBPROCESS": "0"}
"""One kernel of ours for each product and none of torch's, so that graphs are rewritten whatever is fastest."""
NEAR = 1e-5
Step = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved_graphs")


@pytest.fixture(scope="module")
def step(folder: Path) -> Step:
    """Return a function that runs a step of ``saved_graphs`` in a process and returns its report. Steps share caches by default."""

    def done(name: str, *, inductor: str = "inductor", store: str = "gemmtune") -> dict[str, Any]:
        environment = {
            **os.environ,
            **{f"GEMMTUNE_{setting}": value for setting, value in SETTINGS.items()},
            "GEMMTUNE_CACHE_DIR": str(folder / store),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / inductor),
            "PYTHONPATH": os.pathsep.join([str(Path(gemmtune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, str(Path(saved_graphs.__file__)), name, str(folder)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr[-4000:]
        report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return report

    return done


@pytest.fixture(scope="module")
def compiled(step: Step) -> dict[str, Any]:
    """Return the report of the process that compiles, after one that tuned."""
    step("tuned")
    return step("compiled")


def ours(report: dict[str, Any]) -> bool:
    """Return True if both products run our kernels."""
    return len(report["picks"]) == 2 and all(name.startswith("cpp:") for name in report["picks"])


def test_a_third_process_runs_the_cached_graph_of_the_second(compiled: dict[str, Any], step: Step) -> None:
    assert (compiled["autograd_cache_hit"], compiled["fxgraph_cache_miss"]) == (0, 1)
    assert ours(compiled)
    report = step("ran")
    assert (report["autograd_cache_hit"], report["fxgraph_cache_hit"]) == (1, 1)
    assert max(compiled["error"], report["error"]) < NEAR
    assert ours(report)
    assert (report["launches"], report["loaded_in_calls"]) == (2, 0)


def test_a_cached_graph_serves_only_the_same_pass(compiled: dict[str, Any], step: Step) -> None:
    reports = step("elsewhere", inductor="another_inductor")
    hits = {name: (report["autograd_cache_hit"], report["fxgraph_cache_hit"]) for name, report in reports.items()}
    assert hits == {"same": (1, 1), "without_pass": (0, 0), "another_version": (0, 0), "another_source": (0, 0)}
    assert all(report["error"] < NEAR for report in reports.values())


def test_a_function_compiled_ahead_of_time_imports_gemmtune_and_needs_no_store(compiled: dict[str, Any], step: Step) -> None:
    report = step("ahead_of_time", inductor="third_inductor", store="empty")
    assert not report["imported"]
    assert max(report["errors"]) < NEAR
    assert report["operators"] == ["planned", "planned_join", "sum_of_experts", "mm", "bsr_mm"]


def test_code_that_cannot_run_reports_what_is_missing(compiled: dict[str, Any], step: Step) -> None:
    without, another = step("incompatible", inductor="third_inductor", store="empty")["said"]
    assert without == (
        f"ImportError: a compiled graph calls functions of gemmtune {__version__}, which cannot be imported here. "
        "Install that version, or compile the model again without gemmtune."
    )
    assert another == (
        f"UnavailableError: a compiled graph: got one that gemmtune {__version__} made for interface 1 of its functions, "
        f"but gemmtune {__version__} has interface 999. Compile the model again, or install gemmtune {__version__}."
    )


def test_a_graph_without_loadable_kernels_runs_right(compiled: dict[str, Any], step: Step, folder: Path) -> None:
    kernels = list((folder / "gemmtune" / "cpp").glob("*.so"))
    assert kernels
    for path in kernels:
        path.write_text("damaged")
    report = step("ran")
    assert report["autograd_cache_hit"] == 1
    assert report["error"] < NEAR
