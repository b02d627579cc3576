"""Search for CUTLASS and nvcc, and errors for missing, broken or old ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtune import settings
from gemmtune.backends.cutlass import BACKEND, toolkit
from gemmtune.backends.cutlass.toolkit import find_toolkit
from gemmtune.device import preset
from gemmtune.errors import UnavailableError
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for
from gemmtune.toolchain import nvcc as compiler
from gemmtune.toolchain.nvcc import find_compiler

SM90 = preset("sm90")
NO_NVCC = "nvcc is not on PATH: install the CUDA toolkit, or compile on a machine that has it (gemmtune build)"
VERSION = (
    '#!/bin/sh\necho "nvcc: NVIDIA (R) Cuda compiler driver"\necho "Cuda compilation tools, release {}, V{}.1"\necho "Build x"\n'
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a folder with the files of CUTLASS that the search reads."""
    header = tmp_path / "cutlass" / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 3\n#define CUTLASS_PATCH 1\n")
    (tmp_path / "cutlass" / "python" / "cutlass_library").mkdir(parents=True)
    toolkit._toolkit.cache_clear()
    return tmp_path / "cutlass"


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the machine's only nvcc, which a test writes."""
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(compiler, "WHERE_NVCC", ())
    return path


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def message_of(function, *args: object) -> str:
    with pytest.raises(UnavailableError) as caught:
        function(*args)
    return str(caught.value)


def test_reads_version_of_checkout_from_header(checkout: Path) -> None:
    found = find_toolkit(str(checkout))
    assert found.version == "4.3.1"
    assert found.package == checkout / "python"
    assert found.include == (checkout / "include", checkout / "tools" / "util" / "include")


def test_other_path_is_another_toolkit(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(checkout)
    assert find_toolkit(str(checkout)).digest != find_toolkit(str(other)).digest


def test_rejects_folder_that_is_no_checkout(tmp_path: Path, checkout: Path) -> None:
    header = tmp_path / "include" / "cutlass" / "version.h"
    expected = f"cutlass_dir: got {str(tmp_path)!r}, expected a checkout of CUTLASS: {header} is missing"
    assert message_of(find_toolkit, str(tmp_path)) == expected
    (checkout / "python" / "cutlass_library").rmdir()
    assert message_of(find_toolkit, str(checkout)).endswith(f"{checkout}/python/cutlass_library is missing")


def test_reports_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: None)
    expected = "CUTLASS is not installed: pip install 'gemmtune[cutlass]', or set cutlass_dir to a checkout"
    assert message_of(find_toolkit, None) == expected
    available = BACKEND.available(SM90)
    assert (available.ok, available.detail) == (False, expected)


def test_finds_nvcc_and_version(nvcc: Path) -> None:
    written(nvcc, VERSION.format("12.8", "12.8"))
    found = find_compiler()
    assert (found.path, found.cuda, found.version) == (str(nvcc), "12.8", "Build x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VERSION.format("12.2", "12.2"), "{}: got CUDA 12.2, expected 12.3 or newer"),
        ("#!/bin/sh\necho hello\n", "{} --version: got 'hello\\n', expected a release number"),
        ("#!/bin/sh\nexit 3\n", "{} does not run: --version ended with 3"),
    ],
    ids=["too-old", "no-version", "does-not-run"],
)
def test_rejects_unusable_nvcc(nvcc: Path, text: str, expected: str) -> None:
    written(nvcc, text)
    assert message_of(find_compiler) == expected.format(nvcc)


def test_rereads_version_of_replaced_nvcc(nvcc: Path) -> None:
    written(nvcc, VERSION.format("12.8", "12.8"))
    assert find_compiler().cuda == "12.8"
    nvcc.unlink()
    assert message_of(find_compiler) == NO_NVCC
    written(nvcc, VERSION.format("13.0", "13.0"))
    assert find_compiler().cuda == "13.0"


def test_backend_reports_toolkit_and_nvcc(checkout: Path, nvcc: Path) -> None:
    with settings.patch(cutlass_dir=str(checkout)):
        without = BACKEND.available(SM90)
        written(nvcc, VERSION.format("12.8", "12.8"))
        complete = BACKEND.available(SM90)
        on_cpu = BACKEND.available(preset("avx2"))
    assert (complete.ok, complete.detail) == (True, "CUTLASS 4.3.1, nvcc 12.8")
    assert (without.ok, without.detail) == (True, f"CUTLASS 4.3.1, only kernels that were compiled before: {NO_NVCC}")
    assert (on_cpu.ok, on_cpu.detail) == (False, "works on CUDA devices, not on cpu; here: CUTLASS 4.3.1, nvcc 12.8")
    assert not BACKEND.serves_by_default(SM90)


def test_wrong_folder_is_one_refusal_and_other_backends_continue(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="another backend that offers choices without a GPU")
    problem = Problem.mm(512, 512, 512, device_type="cuda")
    with settings.patch(cutlass_dir=str(tmp_path), backends=("triton", "cutlass"), search="quick") as chosen:
        found = offers_for(problem, SM90, chosen)
    assert {choice.backend for choice in found.choices} == {"triton"}
    [refusal] = found.refusals
    assert refusal.name == "cutlass"
    assert refusal.reason.startswith(f"cutlass_dir: got {str(tmp_path)!r}, expected a checkout of CUTLASS")


def test_uses_cutlass_dir_of_given_settings(tmp_path: Path) -> None:
    """Check a change between two calls of one process, independent of the settings in force."""
    pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
    problem = Problem.mm(512, 512, 512, device_type="cuda")
    for folder, count in ((None, True), (str(tmp_path), False), (None, True)):
        with settings.patch(cutlass_dir=folder, backends=("cutlass",), search="quick") as chosen:
            pass
        assert bool(offers_for(problem, SM90, chosen, on_this_machine=False).choices) is count
        assert BACKEND.enumerate(problem, SM90, chosen).choices or folder
