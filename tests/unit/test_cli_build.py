"""``gemmtune build``: what it compiles, what it finds, what failed, and what is wrong usage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpp_kernels import needs_compiler
from fake_nvcc import FakeNvcc, installed

from gemmtune import cli, settings
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.selector.offers import offers_for

NO_NVCC = "nvcc is not on PATH: install the CUDA toolkit, or compile on a machine that has it (gemmtune build)"
WORDS = ("build", "512x512x512", "--arch", "sm90", "--backends", "cutlass", "--search", "quick")

pytestmark = needs_compiler


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvcc]:
    pytest.importorskip("cutlass_library", reason="lists operations with nvidia-cutlass")
    with installed(tmp_path, monkeypatch) as fake:
        yield fake


def built(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    status = cli.run([*words, "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


def test_build_compiles_kernels_that_tuning_finds(nvcc: FakeNvcc, capsys: pytest.CaptureFixture[str]) -> None:
    status, first = built(capsys, *WORDS)
    assert (status, first["compiled"], first["present"], first["failed"]) == (0, 3, 0, [])
    assert 0 < first["seconds"] < 60
    assert nvcc.runs == 3
    status, again = built(capsys, *WORDS)
    assert (status, again["compiled"], again["present"]) == (0, 0, 3)
    nvcc.remove()
    with settings.patch(backends=("cutlass",), search="quick") as chosen:
        found = offers_for(Problem.mm(512, 512, 512, device_type="cuda"), preset("sm90"), chosen).choices
    assert len(found) == 3
    assert all(choice.compiled for choice in found)
    assert first["cache_folder"] == str(nvcc.folder / "cache")
    assert first["device"] == {"name": "NVIDIA H100", "arch": "sm90"}


def test_shapes_of_a_file_share_their_kernels(nvcc: FakeNvcc, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(
        json.dumps([{"m": m, "n": 4096, "k": 4096} for m in (4096, 8192)] + [{"op": "scatter_mm", "m": 1, "n": 1, "k": 1}])
    )
    assert cli.run(["build", "--shapes", str(file), *WORDS[2:]]) == 0
    printed = capsys.readouterr()
    heading, line = printed.out.splitlines()
    assert re.fullmatch(r"2 shapes for NVIDIA H100 \(sm90\), backends cutlass \(.*nvcc 12\.8.*\)", heading)
    assert line.startswith(f"{nvcc.runs} kernels compiled in ")
    assert line.endswith(f" s, 0 already present; in {tmp_path}/cache")
    assert nvcc.runs < 6
    assert "skipped" in printed.err


def test_quiet_shows_no_progress(nvcc: FakeNvcc, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*WORDS, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_kernels_that_are_refused_are_listed(nvcc: FakeNvcc, capsys: pytest.CaptureFixture[str]) -> None:
    nvcc.refuses("error: no such schedule", lines=2)
    assert cli.run([*WORDS, "--quiet"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("0 kernels compiled in ")
    assert lines[2] == "failed: 3"
    assert lines[3].startswith("- cutlass:cutlass3x_sm90")
    assert lines[3].endswith("for mm 512x512x512 bfloat16 nt on cuda: compile_error: error: no such schedule 1")
    assert lines[4] == "    error: no such schedule 2"
    status, data = built(capsys, *WORDS)
    assert (status, len(data["failed"]), data["failed"][0]["problem"]) == (1, 3, "mm 512x512x512 bfloat16 nt on cuda")


def test_missing_kernels_fail_without_nvcc(nvcc: FakeNvcc, capsys: pytest.CaptureFixture[str]) -> None:
    nvcc.remove()
    status, data = built(capsys, *WORDS)
    assert (status, data["compiled"], data["present"]) == (1, 0, 0)
    assert {failure["reason"] for failure in data["failed"]} == {NO_NVCC}


def test_without_cutlass_the_backend_failed(nvcc: FakeNvcc, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with settings.patch(cutlass_dir=str(tmp_path)):
        status, data = built(capsys, *WORDS)
    assert status == 1
    [failure] = data["failed"]
    assert (failure["name"], failure["problem"]) == ("cutlass", "")
    assert failure["reason"].startswith("cutlass_dir: got ")


@pytest.mark.turn(0, 8)
def test_the_kernels_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("build", "32x48x64", "--arch", "portable", "--dtype", "float32", "--search", "quick", "--deny", "_mt|steps")
    with settings.patch(cache_dir=str(tmp_path), max_profiling_configs=1, backends=None):
        status, data = built(capsys, *words)
    assert (status, data["compiled"], data["failed"]) == (0, 1, [])
    assert data["backends"] == ["cpp"]
    assert len(list((tmp_path / "cpp").glob("*.so"))) == 1


def test_operation_without_template_is_reported(nvcc: FakeNvcc, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["build", "512x512x512", "--arch", "sm75", "--backends", "cutlass", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("0 kernels compiled in ")
    assert lines[2:] == ["refused:", "  cutlass: bfloat16 needs compute capability 8.0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "got no shapes, expected MxNxK or BxMxNxK, for instance 16x4096x4096, or --shapes FILE"),
        (("5x5x5", "--backends", "aten"),
         "--backends: got aten, expected one that compiles kernels: ck, cpp, cuda, cutlass, triton"),
    ],
)  # fmt: skip
def test_wrong_usage(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["build", *words]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_interrupt_keeps_compiled_kernels(
    nvcc: FakeNvcc, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gemmtune.cli.build.Compilation", interrupted)
    assert cli.run([*WORDS, "--quiet"]) == 130
    assert f"interrupted: every kernel that was compiled is kept in {nvcc.folder}/cache" in capsys.readouterr().err
