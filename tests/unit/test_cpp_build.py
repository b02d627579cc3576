"""Compilation for the cpp backend: the cache, the errors, and a single compilation among processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from store_cases import fork, status_of

from gemmtune import settings
from gemmtune.backends.cpp import BACKEND, compiler, source
from gemmtune.backends.cpp.build import CppChoice
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cpp.configs import Config
from gemmtune.device import detect
from gemmtune.errors import CompileError, UnavailableError
from gemmtune.problem import Problem

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
SMALL = Config(mr=2, nv=1, mode="steps", kc=64, task_m=1, task_n=1)


def small_choice() -> CppChoice:
    problem = Problem.mm(8, 8, 8, dtype=torch.float32, device_type="cpu")
    (choice,) = BACKEND.choices_of((SMALL,), problem, detect("cpu")).choices
    return choice


@pytest.fixture
def cache(tmp_path: Path):
    with settings.patch(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands of the compilations."""
    commands: list[list[str]] = []
    run = subprocess.run

    def counting(command, *args, **kwargs):
        if "-shared" in command:
            commands.append(command)
        return run(command, *args, **kwargs)

    monkeypatch.setattr(subprocess, "run", counting)
    return commands


def result_of(choice: CppChoice) -> torch.Tensor:
    out = torch.empty(8, 8)
    choice.build().run(out, (torch.eye(8), torch.arange(64.0).reshape(8, 8).t()), ())
    return out


@needs_compiler
def test_a_second_build_compiles_nothing(cache: Path, compiles: list[list[str]]) -> None:
    choice = small_choice()
    assert not choice.compiled
    choice.compile()
    assert choice.compiled
    assert torch.equal(result_of(choice), torch.arange(64.0).reshape(8, 8).t())
    small_choice().compile()
    assert len(compiles) == 1
    assert [p.suffix for p in sorted((cache / "cpp").iterdir()) if p.suffix != ".lock"] == [".so"]


@needs_compiler
def test_a_damaged_artifact_is_recompiled(cache: Path, compiles: list[list[str]]) -> None:
    choice = small_choice()
    choice.compile()
    (artifact,) = (cache / "cpp").glob("*.so")
    artifact.write_bytes(b"not a shared object")
    assert torch.equal(result_of(choice), torch.arange(64.0).reshape(8, 8).t())
    assert len(compiles) == 2


@needs_compiler
def test_a_refused_source_is_a_compile_error_with_the_compilers_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(source._ARCH_FLAGS, detect("cpu").arch, ("-include", "nowhere_to_be_found.h"))
    choice = small_choice()
    with pytest.raises(CompileError, match=r"(?s)cpp:.*did not compile.*nowhere_to_be_found") as caught:
        choice.compile()
    assert caught.value.name == choice.name
    assert not choice.compiled
    assert not list((cache / "cpp").glob("*.so"))


def test_without_a_compiler_nothing_is_available(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    available = BACKEND.available(detect("cpu"))
    assert not available.ok
    assert available.detail == "no C++ compiler on PATH (c++, g++, clang++); install g++ or clang++"
    choice = small_choice()
    assert not choice.compiled
    with pytest.raises(
        UnavailableError, match="no C\\+\\+ compiler on PATH, expected one of c\\+\\+, g\\+\\+, clang\\+\\+; install"
    ):
        choice.compile()


def test_ignores_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = compiler.find_compiler()
    assert found is None or found.path != str(broken)


@needs_compiler
def test_a_cache_folder_that_cannot_be_used_is_a_compile_error(tmp_path: Path) -> None:
    (tmp_path / "cpp").write_text("a file where the folder of kernels should be")
    with (
        settings.patch(cache_dir=str(tmp_path)),
        pytest.raises(CompileError, match=r"the cache folder cannot be used: .*; set GEMMTUNE_CACHE_DIR to a folder of yours"),
    ):
        small_choice().compile()


@needs_compiler
def test_only_one_of_two_processes_compiles(tmp_path: Path) -> None:
    """A fake compiler records its runs while two processes need the same kernel at the same time."""
    found = compiler.find_compiler()
    assert found is not None
    noting = tmp_path / "bin" / "c++"
    noting.parent.mkdir()
    noting.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo run >> {tmp_path}/runs; sleep 0.5;; esac\nexec {found.path} "$@"\n')
    noting.chmod(0o755)

    def work() -> None:
        os.environ["PATH"] = f"{noting.parent}:{os.environ['PATH']}"
        with settings.patch(cache_dir=str(tmp_path / "cache")):
            small_choice().compile()

    children = [fork(work) for _ in range(2)]
    assert [status_of(child) for child in children] == [0, 0]
    assert (tmp_path / "runs").read_text().splitlines() == ["run"]
    assert len(list((tmp_path / "cache" / "cpp").glob("*.so"))) == 1


@needs_compiler
def test_artifacts_depend_on_the_compiler(cache: Path) -> None:
    found = compiler.find_compiler()
    assert found is not None
    other = compiler.Compiler(path=found.path, version="another version")
    assert compiler.artifact_path(small_choice().source, found) != compiler.artifact_path(small_choice().source, other)


def test_source_has_no_unrendered_text() -> None:
    text = small_choice().source.text
    assert "{%" not in text
    assert "{{ " not in text
    assert "gemmtune_gemm" in text
