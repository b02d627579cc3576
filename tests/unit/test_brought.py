"""Modules that users bring along: one that ends its process is left out with a word, and what they print spoils no JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemmtune import cli, settings, warning
from gemmtune.cli.output import print_json, reserved_stdout
from gemmtune.settings import Settings
from gemmtune.tuning import brought
from gemmtune.tuning.brought import surviving, with_surviving
from gemmtune.untrusted import candidate

BAD = {
    "leaving": ("import os; os._exit(4)", "exited with status 4"),
    "aborting": ("import os; os.abort()", "died by SIGABRT"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "died by SIGKILL"),
    "hanging": ("import time; time.sleep(1000)", "no answer within 3 s"),
}
SLY = {
    "patching": "import torch; torch.mm = torch.matmul",
    "searching": "import gc; gc.get_objects()",
    "meddling": "import os; os.kill(os.getppid(), 0)",
}
GOOD = {"exiting": "raise SystemExit(3)", "failing": "1 / 0", "plain": "def f(a, b): return a @ b"}
NOISY = """
import atexit, ctypes, os, torch
print("from python")
os.write(1, b"from the system\\n")
os.system("echo from a child")
ctypes.CDLL(None).puts(b"from C")
ctypes.CDLL(None).fflush(None)
atexit.register(print, "from the end")

def matmul(a, b):
    return torch.matmul(a, b)

matmul.gemm_traits = {"ops": ["mm"], "dtypes": ["float32"], "deterministic": True}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules in the working folder."""
    for name, (text, _) in BAD.items():
        (tmp_path / f"{name}.py").write_text(text)
    for name, text in (GOOD | SLY).items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (brought, candidate):
        monkeypatch.setattr(module, "IMPORT_S", 3.0)
    brought._why_not.cache_clear()
    monkeypatch.setattr(warning, "_said", set())  # each text is a warning once in a process
    return tmp_path


@pytest.mark.turn(3, 8)
@pytest.mark.usefixtures("folder")
def test_a_module_that_ends_its_process_is_left_out_with_the_reason():
    targets = tuple(f"{name}:f" for name in (*BAD, *GOOD, "nowhere"))
    with pytest.warns(RuntimeWarning) as seen:
        assert surviving(targets) == tuple(f"{name}:f" for name in (*GOOD, "nowhere"))
    texts = [str(warning.message) for warning in seen if warning.category is RuntimeWarning]
    assert len(texts) == len(BAD)
    for text, (name, (_, reason)) in zip(texts, BAD.items(), strict=True):
        assert text.startswith(f"own:{name}:f is left out: the import of {name} ended its process: ")
        assert reason in text
    assert not {*BAD, *GOOD} & sys.modules.keys()


@pytest.mark.turn(4, 8)
@pytest.mark.usefixtures("folder")
def test_a_module_that_deceives_others_is_left_out_before_this_process_imports_it():
    with pytest.warns(RuntimeWarning) as seen:
        assert surviving(tuple(f"{name}:f" for name in SLY)) == ()
    texts = " ".join(str(warning.message) for warning in seen)
    for words in (
        "patching replaces functions: torch.mm",
        "searching looks for its judge: gc.get_objects",
        "meddling reaches other",
    ):
        assert f"the import of {words}" in texts
    assert not SLY.keys() & sys.modules.keys()


@pytest.mark.turn(5, 8)
@pytest.mark.usefixtures("folder")
def test_the_command_goes_on_without_it(capsys: pytest.CaptureFixture[str]):
    given = ["choices", "64x64x64", "--dtype", "float32", "--backends", "aten", "--with", "leaving:f", "--json", "-"]
    assert cli.run(given) == 0
    out, err = capsys.readouterr()
    assert [choice["name"] for choice in json.loads(out)["choices"]] == ["aten:mm"]
    assert "warning: own:leaving:f is left out: the import of leaving ended its process: exited with status 4" in err
    with pytest.warns(RuntimeWarning, match="own:leaving:g is left out"):
        assert with_surviving(Settings(extra_choices=("leaving:g",))).extra_choices is None
    here = Settings(extra_choices=("leaving:f",), tune_in_subprocess=False)
    assert with_surviving(here) is here
    with settings.patch(extra_choices=("leaving:h",)):
        assert cli.run(["choices", "64x64x64", "--dtype", "float32", "--backends", "aten"]) == 0
    assert "warning: own:leaving:h is left out" in capsys.readouterr().err


@pytest.mark.turn(1, 8)
def test_what_modules_print_is_no_part_of_the_json(folder: Path):
    """In a process of its own, whose end prints too."""
    path = os.pathsep.join(sys.path)
    given = ["choices", "64x64x64", "--dtype", "float32", "--backends", "aten", "--with", "noisy:matmul", "--json", "-"]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "gemmtune", *given], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert [choice["name"] for choice in json.loads(done.stdout)["choices"]] == ["aten:mm", "own:noisy:matmul"]
    for words in ("from python", "from the system", "from a child", "from C", "from the end"):
        assert words in done.stderr


def test_standard_output_is_reserved_and_given_back(capfd: pytest.CaptureFixture[str]):
    print("before")
    with reserved_stdout():
        print("noise")
        os.write(1, b"more noise\n")
        print_json("[1]")
        with reserved_stdout():
            print_json("[2]")
        print("noise again")
    print("after")
    out, err = capfd.readouterr()
    assert out.replace("more noise\n", "") == "before\n[1]\n[2]\nafter\n"
    assert "noise\n" in err
