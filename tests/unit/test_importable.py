"""A GEMM in a file is named by the file, as a GEMM in a module is named by the module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gemmtune.cli.asked import settings_changes
from gemmtune.conformance.options import RunOptions
from gemmtune.declaration.named import found_at, importable
from gemmtune.errors import SubjectError

NAME = "gemm_in_a_file"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_a_file_becomes_a_module_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"{NAME}.py"
    file.write_text("def matmul(a, b):\n    return a @ b\n")
    assert importable(f"{file}:matmul") == f"{NAME}:matmul" == RunOptions(backend=f"{file}:matmul").spec.target
    monkeypatch.chdir(tmp_path)
    assert importable(f"{NAME}.py:matmul") == f"{NAME}:matmul"
    assert found_at(f"{NAME}:matmul").__module__ == NAME
    assert sys.path.count(str(tmp_path)) == 1
    assert importable("mypkg.ops:matmul") == "mypkg.ops:matmul"
    assert settings_changes({"extra_choices": (f"{NAME}.py:matmul",)}) == {"extra_choices": (f"{NAME}:matmul",)}


def test_the_setting_takes_modules_and_says_which_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("def matmul(a, b):\n    return a @ b\n")
    monkeypatch.chdir(tmp_path)
    for there in (f"{NAME}.py", f"folder/{NAME}.py"):
        with pytest.raises(SubjectError, match=f"got the name of a file, expected that of a module, such as {NAME}:matmul"):
            found_at(f"{there}:matmul")


def test_no_file_and_another_modules_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("")
    with pytest.raises(SubjectError, match="json is the name of another module; rename the file"):
        importable(f"{tmp_path}/json.py:matmul")
    with pytest.raises(SubjectError, match="expected a file that exists, or a module such as"):
        importable("missing.py:matmul")
