"""The pytest plugin: how it is loaded, what it adds, and that it does nothing unless it is loaded."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
IMPORTABLE = (str(ROOT), str(Path(__file__).parent))
LOADED = ("-p", "no:cacheprovider", "-p", "gemmtune.conformance.plugin", "--pyargs", "gemmtune.conformance")
HERE = ("--gemm-device=cpu", "--gemm-in-process")
"""Options for a run without a process that imports torch once more."""
SUITE = (*LOADED, "--gemm-backend=conformance_functions:right", *HERE)
Pytest = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def another_project(tmp_path: Path) -> Path:
    """Return a folder unrelated to gemmtune."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    return tmp_path


@pytest.fixture
def in_a_new_process(another_project: Path) -> Pytest:
    """Return a function that runs pytest in that folder, in a process where gemmtune is only importable."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST") and name != "CI"}
    environment["PYTHONPATH"] = os.pathsep.join(IMPORTABLE)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(
            command, cwd=another_project, env=environment, capture_output=True, text=True, check=False, timeout=200
        )

    return call


@pytest.fixture
def in_another_project(another_project: Path) -> Pytest:
    """Return the same function for a fork of this process, which has imported torch already."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        texts = [another_project / name for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            _run_pytest(another_project, texts, arguments)
        _, status = os.waitpid(child, 0)
        out, err = (text.read_text() for text in texts)
        return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(status), out, err)

    return call


def _run_pytest(folder: Path, texts: list[Path], arguments: tuple[str, ...]) -> NoReturn:
    """Run pytest in the forked process, without settings and plugins of the current run."""
    status = -1
    try:
        gc.freeze()  # keeps this process's objects out of garbage collections
        os.chdir(folder)
        for number, text in enumerate(texts, 1):
            os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115 - ends with the process
        for name in [name for name in os.environ if name.startswith("PYTEST") or name == "CI"]:
            del os.environ[name]
        os.environ["PYTHONPATH"] = os.pathsep.join(IMPORTABLE)
        for name in [name for name in sys.modules if name == "conftest" or name.endswith(".conftest")]:
            del sys.modules[name]
        status = int(pytest.main(list(arguments)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)


def test_without_loading_the_plugin_a_project_is_unaffected(in_a_new_process: Pytest) -> None:
    assert "gemm" not in in_a_new_process("--help").stdout


def test_loaded_without_a_gemm_it_changes_nothing(in_another_project: Pytest) -> None:
    done = in_another_project(*LOADED[:4], "-q")
    assert done.returncode == 0
    assert "1 passed" in done.stdout
    assert "conformance" not in done.stdout


def test_the_suite_without_a_gemm_says_what_is_missing(in_another_project: Pytest) -> None:
    done = in_another_project(*LOADED)
    assert done.returncode == 2
    assert "got no GEMM, expected --gemm-backend=package.module:function" in done.stdout


def test_a_gemm_without_the_suite_says_what_is_missing(in_another_project: Pytest) -> None:
    done = in_another_project(*SUITE[:4], *SUITE[6:])
    assert done.returncode == 2
    missing = "the suite was not collected: add --pyargs gemmtune.conformance"
    assert missing in done.stdout
    assert missing not in in_another_project(*SUITE, "-k", "no_such_property").stdout


def test_a_missing_gemm_has_status_2(in_another_project: Pytest) -> None:
    done = in_another_project(*LOADED, "--gemm-backend=nowhere:f")
    assert done.returncode == 2
    assert "nowhere:f: there is no module 'nowhere' here" in done.stdout + done.stderr


def test_a_wrong_option_is_a_usage_error(in_another_project: Pytest) -> None:
    done = in_another_project(*SUITE, "--gemm-dtype=f17")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "dtype: got 'f17', expected one of float64" in done.stderr


def test_the_cases_are_collected_quickly_once_each_and_property_by_property(in_another_project: Pytest) -> None:
    begun = os.times()
    done = in_another_project(*SUITE, "--collect-only", "-q")
    assert os.times().children_user - begun.children_user < 30  # 5 s on a fast core
    assert done.returncode == 0
    ids = [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "test_property[" in line]
    assert len(ids) == len(set(ids)) > 300
    names = [case_id.partition(":")[0] for case_id in ids]
    assert names == sorted(names, key=list(dict.fromkeys(names)).index)


@pytest.mark.turn(2, 6)
def test_xdist_workers_find_the_same(in_another_project: Pytest, tmp_path: Path) -> None:
    picked = ("-k", "identity and f32", "-q")
    reports = []
    for processes in ("0", "2"):
        done = in_another_project(*SUITE, *picked, "-n", processes, f"--gemm-json={tmp_path / 'r.json'}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "CONFORMS in 1 of " in done.stdout
        reports.append(json.loads((tmp_path / "r.json").read_text()))
    alone, shared = ({p["name"]: (p["verdict"], p["executed"], p["failed"]) for p in report["properties"]} for report in reports)
    assert alone == shared
    assert alone["identity"][1] > 3


def test_a_failure_is_reported_without_the_stack_of_the_suite(in_another_project: Pytest) -> None:
    case_id = "integers:mm-f32-17x33x65"
    done = in_another_project(*LOADED, "--gemm-backend=conformance_functions:drops_last", *HERE, f"--gemm-repro={case_id}")
    assert done.returncode == 1
    assert (
        f"again: gemmtune conformance conformance_functions:drops_last --device cpu --in-process --repro {case_id}" in done.stdout
    )
    assert "elements are wrong" in done.stdout
    assert "Traceback" not in done.stdout
    assert "1 failed in" in done.stdout


def test_a_warning_is_no_fault_of_a_gemm_where_a_project_makes_errors_of_them(in_another_project: Pytest) -> None:
    one_case = "--gemm-repro=integers:mm-f32-17x33x65"
    done = in_another_project(*LOADED, "--gemm-backend=conformance_functions:warns", *HERE, one_case, "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "line", ["python_files = *_check.py", "python_functions = check_*", "empty_parameter_set_mark = fail_at_collect"]
)
def test_a_project_with_other_rules_of_tests_runs_the_suite(in_another_project: Pytest, another_project: Path, line: str) -> None:
    (another_project / "pytest.ini").write_text(f"[pytest]\n{line}\n")
    done = in_another_project(*SUITE, "--gemm-repro=integers:mm-f32-17x33x65")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 case executed" in done.stdout
    assert "1 passed in" in done.stdout


ONE_CASE = """
def pytest_collection_modifyitems(config, items):
    picked = [item for item in items if "[integers:" in item.name][:1]
    config.hook.pytest_deselected(items=[item for item in items if item not in picked])
    items[:] = picked
"""


@pytest.mark.rotates(2)
@pytest.mark.parametrize("processes", ["0", "1"])
def test_cases_that_another_plugin_selects_are_no_fewer_than_the_level_asks_for(
    in_another_project: Pytest, another_project: Path, processes: str
) -> None:
    (another_project / "conftest.py").write_text(ONE_CASE)
    done = in_another_project(*SUITE, "-n", processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 case executed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ((), 0, "1 passed, 1 skipped"),
        (("-m", "gpu"), pytest.ExitCode.USAGE_ERROR, "-m gpu: got no GPU (torch sees none), expected one"),
        (("-m", "gpu", "-n", "2"), pytest.ExitCode.USAGE_ERROR, "-m gpu: got no GPU (torch sees none), expected one"),
    ],
)
def test_gpu_tests_are_skipped_without_a_gpu_and_m_gpu_is_an_error(
    in_another_project: Pytest, tmp_path: Path, arguments: tuple[str, ...], status: int, text: str
) -> None:
    (tmp_path / "test_gpu.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_gpu():\n    assert False\n")
    (tmp_path / "conftest.py").write_text("import torch\n\ntorch.cuda.is_available = lambda: False\n")
    done = in_another_project(*LOADED[:4], *arguments)
    assert done.returncode == status
    assert text in done.stdout + done.stderr
