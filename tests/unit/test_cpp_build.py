"""Compilation for the cpp backend: the cache, the errors, and a single compilation among processes."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from store_cases import fork, one_warning, status_of

import gemmtune
from gemmtune import settings
from gemmtune.backends.cpp import BACKEND, compiler, source
from gemmtune.backends.cpp.build import CppChoice
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.backends.cpp.configs import Config
from gemmtune.cache import cache_dir, present
from gemmtune.choice import Availability
from gemmtune.device import detect
from gemmtune.errors import CompileError, UnavailableError
from gemmtune.problem import Problem
from gemmtune.timing import limits
from gemmtune.toolchain import made_once
from gemmtune.toolchain.tool import run_tool

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

    def counting(command, **kwargs):
        commands.append(command)
        return run_tool(command, **kwargs)

    monkeypatch.setattr(made_once, "run_tool", counting)
    return commands


def result_of(choice: CppChoice) -> torch.Tensor:
    out = torch.empty(8, 8)
    choice.build().run(out, (torch.eye(8), torch.arange(64.0).reshape(8, 8).t()), ())
    return out


def test_a_compilation_removes_what_killed_ones_left_behind(cache: Path) -> None:
    folder = cache_dir("cpp")
    for name, age_s in (("tmpold", 1e6), ("tmpnew", 0.0)):
        (folder / name).mkdir()
        (folder / name / "part.cpp").touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    made_once.made_once(("cpp", "x.so"), lambda made: made.write_text("compiled") and None, "a kernel")
    assert sorted(path.name for path in folder.glob("tmp*")) == ["tmpnew"]


def test_a_compilation_takes_no_notice_of_folders_that_vanish(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other processes, which compile other kernels, do so at any time."""
    folder = cache_dir("cpp")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([folder / "tmpgone"]))
    path = made_once.made_once(("cpp", "y.so"), lambda made: made.write_text("compiled") and None, "a kernel")
    assert path.read_text() == "compiled"


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


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "a few bytes": lambda whole: whole[:30],
    "half of it": lambda whole: whole[: len(whole) // 2],
    "a text": lambda _: b"not a shared object, but longer than the header of one" * 100,
    "wrong ELF class": lambda whole: whole[:4] + b"\x01" + whole[5:],
    "of another machine": lambda whole: whole[:18] + b"\xf3\x00" + whole[20:],
}


@pytest.mark.turn(7, 8)
@needs_compiler
def test_damaged_artifacts_are_made_anew(tmp_path: Path, compiles: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that measures the machine's rate is loaded by tune itself, so that an exception there would end it.

    Each damage has a folder of its own, because the loader knows a path that it has loaded. Both files are loaded by one function:
    in turn one is damaged and the other is whole.
    """
    whole: dict[str, bytes] = {}
    for turn, (what, damage) in enumerate({"none": bytes, **DAMAGED}.items()):
        with settings.patch(cache_dir=str(tmp_path / what)):
            for place, (name, content) in enumerate(sorted(whole.items())):
                changed = damage(content) if (turn + place) % 2 else content
                (cache_dir(Path(name).parent.name) / Path(name).name).write_bytes(changed)
            compiles.clear()
            assert torch.equal(result_of(small_choice()), torch.arange(64.0).reshape(8, 8).t()), what
            assert limits.fma_gflops(detect("cpu"), "float"), what
            made = sum("/trials/" not in command[-1] for command in compiles)
            assert made == (1 if whole else 2), what
        files = [path for path in (tmp_path / what).rglob("*.*") if path.suffix != ".lock" and path.parent.name != "trials"]
        assert all(present(path) for path in files)
        whole = {str(path.relative_to(tmp_path / what)): path.read_bytes() for path in files}
        assert len(whole) == 2, whole.keys()


@needs_compiler
def test_damaged_artifact_without_a_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_choice().compile()
    next((cache / "cpp").glob("*.so")).write_bytes(b"")
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(
        UnavailableError, match=r"\.so cannot be loaded \(.*expected an ELF file\) and not be made anew: .*no C\+\+ comp"
    ):
        small_choice().load()
    assert limits.fma_gflops(detect("cpu"), "float") is None


@needs_compiler
def test_a_refused_source_is_a_compile_error_with_the_compilers_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(source._ARCH_FLAGS, detect("cpu").arch, ("-include", "nowhere_to_be_found.h"))
    choice = small_choice()
    with pytest.raises(CompileError, match=r"(?s)cpp:.*did not compile.*nowhere_to_be_found") as caught:
        choice.compile()
    assert caught.value.name == choice.name
    assert not choice.compiled
    assert not list((cache / "cpp").glob("*.so"))


@needs_compiler
def test_the_compiler_that_the_environment_names_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compiler.find_compiler()
    assert found is not None
    own = tmp_path / "own-c++"
    own.symlink_to(found.path)
    monkeypatch.setenv("CXX", str(own))
    assert compiler.find_compiler() == dataclasses.replace(found, path=str(own))
    assert compiler.why_no_compiler() is None
    monkeypatch.setenv("CXX", "absent-c++")
    assert compiler.find_compiler() == found
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.why_no_compiler() == "no C++ compiler on PATH (absent-c++, c++, g++, clang++); install g++ or clang++"


@needs_compiler
def test_without_a_compiler_what_was_compiled_runs(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none = "no C++ compiler on PATH (c++, g++, clang++); install g++ or clang++"
    small_choice().compile()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert BACKEND.available(detect("cpu")) == Availability(ok=True, detail=f"only kernels that were compiled before: {none}")
    choice = small_choice()
    assert choice.compiled
    assert choice.obstacle is None
    assert torch.equal(result_of(choice), torch.arange(64.0).reshape(8, 8).t())
    (other,) = BACKEND.choices_of((dataclasses.replace(SMALL, mr=1),), choice.problem, detect("cpu")).choices
    assert (other.compiled, other.obstacle) == (False, none)
    with pytest.raises(UnavailableError, match=re.escape(none)):
        other.compile()


def test_a_compiler_that_does_not_run_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = f"{tmp_path}/g++ does not run: --version ended with 3; repair it, or put another compiler first on PATH"
    assert BACKEND.available(detect("cpu")).detail == f"only kernels that were compiled before: {reason}"


BROKEN = {
    "exit 1": "refused, as it does everything",
    "sleep 100 & wait": "did not end within 0.5 s",
    'echo garbage > "$last"': "expected an ELF file",
    "exit 0": "ended with 0, expected 0 and a file",
    'head -c 5000 /dev/zero > "$last"': "expected an ELF file",
}


@pytest.mark.turn(1, 8)
@pytest.mark.parametrize(("does", "reason"), BROKEN.items(), ids=["refuses", "hangs", "garbage", "nothing", "zeros"])
def test_broken_compiler_costs_one_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str, reason: str
) -> None:
    broken = tmp_path / "c++"
    broken.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "c++ 1" && exit\nfor last; do :; done\n'
        f"[ '{does}' = 'exit 1' ] && echo 'refused, as it does everything' >&2\n{does}\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(compiler, "TRIAL_TIMEOUT_S", 0.5)
    a, b = torch.randn(40, 24), torch.randn(24, 56)
    words = f"{re.escape(str(broken))} makes no library that can be loaded: .*{reason}.*; repair it, or put another compiler first"
    # A process that other tests left has the compiler of its start.
    with settings.patch(tune_in_subprocess=False), one_warning(f"(?s)^{words} on PATH"):
        assert torch.equal(gemmtune.mm(a, b), a @ b)
        result = gemmtune.tune("mm", a, b, progress=False)[0]
        reasons = {refusal.reason for refusal in result.refusals if refusal.name.startswith("cpp:")}
        assert compiler.why_no_compiler() in reasons
        assert limits.fma_gflops(detect("cpu"), "float") is None
    assert result.pick == "aten:mm"
    assert "makes no library" in BACKEND.available(detect("cpu")).detail


def test_ignores_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = compiler.find_compiler()
    assert found is None or found.path != str(broken)


@needs_compiler
def test_a_full_disk_is_a_compile_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with (
        settings.patch(cache_dir=str(tmp_path)),
        pytest.raises(
            CompileError, match=r"the cache folder cannot be used: .*No space.*; set GEMMTUNE_CACHE_DIR to a folder of yours"
        ),
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


def test_artifacts_depend_on_the_machine_and_not_on_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = small_choice().source
    file = compiler.artifact_file(source)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.artifact_file(source) == file
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert compiler.artifact_file(source) != file


def test_source_has_no_unrendered_text() -> None:
    text = small_choice().source.text
    assert "{%" not in text
    assert "{{ " not in text
    assert "gemmtune_gemm" in text
