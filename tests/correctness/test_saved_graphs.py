"""Compiled graphs from a cache, in processes that did not compile them: they find the functions that they call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import saved_graphs
from cpp_kernels import needs_compiler
from rotation import rotated
from worker_server import Server

import gemmtune
from gemmtune.version import __version__

pytestmark = [needs_compiler, pytest.mark.slow]
SETTINGS = {"BACKENDS": "cpp", "SEARCH": "quick", "MAX_PROFILING_CONFIGS": "1", "TUNE_IN_SUBPROCESS": "0"}
"""One kernel of ours for each product, so that graphs are rewritten even where torch is faster."""
INDUCTOR = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
"""Inductor does not compile programs that try instructions, nor headers for later graphs."""
NEAR = 1e-5
Step = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved_graphs")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Yield a server whose forks have imported torch and its compiler, which takes most of a step, and nothing of gemmtune."""
    with patch.dict(os.environ, INDUCTOR):
        server = Server("torch._inductor.compile_fx")
        yield server
    server.forget()


@pytest.fixture(scope="module")
def step(folder: Path, server: Server) -> Step:
    """Do a step of ``saved_graphs`` in a process, and return its report. Without other names all share their caches."""

    def done(name: str, *, inductor: str = "inductor", store: str = "gemmtune", started: bool = False) -> dict[str, Any]:
        environment = {
            **{f"GEMMTUNE_{setting}": value for setting, value in SETTINGS.items()},
            "GEMMTUNE_CACHE_DIR": str(folder / store),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / inductor),
            "PYTHONPATH": os.pathsep.join([str(Path(gemmtune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        with patch.dict(os.environ, environment), (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            if started:  # as by a user
                command = [sys.executable, str(Path(saved_graphs.__file__)), name, str(folder)]
                status = subprocess.run(command, stdout=out, stderr=err, check=False).returncode
            else:
                code = f"import saved_graphs; saved_graphs.main({name!r}, {str(folder)!r})"
                status = server.fork(code, {1: out.fileno(), 2: err.fileno()}).wait()
        assert status == 0, (folder / "err").read_text()[-4000:]
        report: dict[str, Any] = json.loads((folder / "out").read_text().splitlines()[-1])
        return report

    return done


@pytest.fixture(scope="module")
def compiled(step: Step) -> dict[str, Any]:
    """Return the report of the process that compiles, after one that tuned."""
    step("tuned")
    return step("compiled")


def ours(report: dict[str, Any]) -> bool:
    """Return True if kernels of ours are planned for both products."""
    return len(report["picks"]) == 2 and all(name.startswith("cpp:") for name in report["picks"])


@pytest.mark.turn(1, 8)
def test_the_third_process_runs_the_graph_that_the_second_compiled(compiled: dict[str, Any], step: Step) -> None:
    assert (compiled["autograd_cache_hit"], compiled["fxgraph_cache_miss"]) == (0, 1)
    assert ours(compiled)
    report = step("ran")
    assert (report["autograd_cache_hit"], report["fxgraph_cache_hit"]) == (1, 1)
    assert max(compiled["error"], report["error"]) < NEAR
    assert ours(report)
    assert (report["launches"], report["loaded_in_calls"]) == (2, 0)


@pytest.mark.turn(4, 8)
def test_a_graph_is_taken_from_another_cache_only_for_the_same_pass(compiled: dict[str, Any], step: Step) -> None:
    reports = step("elsewhere", inductor="another_inductor")
    hits = {name: (report["autograd_cache_hit"], report["fxgraph_cache_hit"]) for name, report in reports.items()}
    assert hits == {"same": (1, 1), "without_pass": (0, 0), "another_version": (0, 0), "another_source": (0, 0)}
    assert all(report["error"] < NEAR for report in reports.values())


@pytest.fixture(scope="module")
def ahead_of_time(compiled: dict[str, Any], step: Step) -> dict[str, Any]:
    """Return the report of a process that loads what another one compiled ahead of time. One of four starts as a user's does."""
    started = rotated((True, False, False, False), 4, "started")[0]
    return step("ahead_of_time", inductor="third_inductor", store="empty", started=started)


@pytest.mark.turn(2, 8)
def test_a_function_compiled_ahead_of_time_brings_gemmtune_and_needs_no_store(ahead_of_time: dict[str, Any]) -> None:
    assert not ahead_of_time["imported"]
    assert max(ahead_of_time["errors"]) < NEAR
    assert ahead_of_time["operators"] == ["planned", "planned_join", "sum_of_experts", "mm", "bsr_mm"]


@pytest.mark.turn(2, 8)
def test_code_that_cannot_run_here_says_what_is_missing(ahead_of_time: dict[str, Any]) -> None:
    without, another = ahead_of_time["said"]
    assert without == (
        f"ImportError: a compiled graph calls functions of gemmtune {__version__}, which cannot be imported here. "
        "Install that version, or compile the model again without gemmtune."
    )
    assert another == (
        f"UnavailableError: a compiled graph: got one that gemmtune {__version__} made for interface 3 of its functions, "
        f"but gemmtune {__version__} has interface 999. Compile the model again, or install gemmtune {__version__}."
    )


@pytest.mark.turn(5, 8)
def test_a_graph_runs_right_where_its_kernels_cannot_be_loaded(compiled: dict[str, Any], step: Step, folder: Path) -> None:
    kernels = list((folder / "gemmtune" / "cpp").glob("*.so"))
    assert kernels
    for path in kernels:
        path.write_text("damaged")
    report = step("ran")
    assert report["autograd_cache_hit"] == 1
    assert report["error"] < NEAR
