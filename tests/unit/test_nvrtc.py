"""NVRTC: search for the library, choice among several, compiled cubins and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gemmtune.errors import CompileError, UnavailableError
from gemmtune.toolchain import cubin
from gemmtune.toolchain.cubin import Nvrtc, find_nvrtc, libraries


def found() -> Nvrtc | None:
    try:
        return find_nvrtc()
    except UnavailableError:
        return None


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Look for the library anew in each test, and after it."""
    find_nvrtc.cache_clear()
    yield
    find_nvrtc.cache_clear()


@pytest.fixture
def toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three toolkits and no packages."""
    folders = [tmp_path / name for name in ("old", "new", "other")]
    for folder, version in zip(folders, ("11", "13", "12"), strict=True):
        (folder / "lib64").mkdir(parents=True)
        for name in (f"libnvrtc.so.{version}", f"libnvrtc-builtins.so.{version}.0", f"libnvrtc.so.{version}.alt"):
            (folder / "lib64" / name).touch()
    monkeypatch.setattr(cubin, "toolkit_folders", lambda: folders)
    monkeypatch.setattr(cubin.importlib.util, "find_spec", lambda name: None)
    return folders


@pytest.mark.parametrize(("built_for", "majors"), [(None, [13, 12, 11]), ("12.8", [12, 13, 11]), ("13.0", [13, 12, 11])])
def test_torchs_version_comes_first_and_then_the_newest(
    toolkits: list[Path], monkeypatch: pytest.MonkeyPatch, built_for: str | None, majors: list[int]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert [path.name for path in libraries()] == [f"libnvrtc.so.{major}" for major in majors]


def test_skips_old_and_unloadable_libraries(toolkits: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def version(self: Nvrtc) -> tuple[int, int]:
        if self.path.name.endswith("13"):
            raise OSError("no such symbol")
        return (12, 3) if self.path.name.endswith("12") else (11, 8)

    monkeypatch.setattr(Nvrtc, "version", property(version))
    assert str(find_nvrtc()) == "NVRTC 12.3"
    monkeypatch.setattr(cubin, "libraries", pytest.fail)
    assert str(find_nvrtc()) == "NVRTC 12.3", "a process looks for it once"
    monkeypatch.setattr(cubin, "libraries", libraries)
    find_nvrtc.cache_clear()
    (toolkits[2] / "lib64" / "libnvrtc.so.12").unlink()
    reason = r"libnvrtc\.so\.13 cannot be loaded: no such symbol; .*libnvrtc\.so\.11: got CUDA 11\.8, expected 12\.3 or newer"
    with pytest.raises(UnavailableError, match=reason):
        find_nvrtc()


def test_reports_a_missing_library_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "libraries", list)

    def no_nvcc() -> None:
        raise UnavailableError("nvcc is not on PATH")

    monkeypatch.setattr(cubin, "find_compiler", no_nvcc)
    with pytest.raises(UnavailableError, match=r"there is no libnvrtc; nvcc is not on PATH\): install NVRTC \(pip install nvidia"):
        cubin.find_cubin_compiler()


@pytest.mark.skipif(found() is None, reason="needs NVRTC (pip install nvidia-cuda-nvrtc)")
def test_compiles_cubins_and_reports_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, called, library = find_nvrtc(), list[str](), cubin._library

    class Noted:
        def __getattr__(self, name: str) -> object:
            called.append(name)
            return getattr(library(compiler.path), name)

    monkeypatch.setattr(cubin, "_library", lambda path: Noted())
    options = ["-std=c++17", "--gpu-architecture=sm_90a"]
    assert compiler.cubin('extern "C" __global__ void f(float4* x) { x->y = 1; }', options, "a name")[:4] == b"\x7fELF"
    with pytest.raises(CompileError, match='identifier "undefined" is undefined') as caught:
        compiler.cubin('extern "C" __global__ void f(float* x) { *x = undefined; }', options, "a name")
    assert str(caught.value).startswith("a name did not compile")
    with pytest.raises(CompileError, match="unrecognized option --no-such-option"):
        compiler.cubin("", ["--no-such-option"], "a name")
    assert called.count("nvrtcDestroyProgram") == called.count("nvrtcCreateProgram") == 3
