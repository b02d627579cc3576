"""``gemmtune bundle``: what one machine tuned runs from a read-only folder, without a compiler and without a word."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import stat
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from namespaces import MS_RDONLY, mounted
from store_cases import one_warning

import gemmtune
from gemmtune import cli, settings
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.cache import cache_dir
from gemmtune.dispatch import absent
from gemmtune.dispatch.ready import forget_plans
from gemmtune.errors import CompileError
from gemmtune.native import build
from gemmtune.store.store import Store, open_store
from gemmtune.toolchain import triton_kernels as kernels

A, B = torch.randn(40, 24), torch.randn(24, 56)


@pytest.fixture
def tuned(tmp_path: Path) -> Iterator[Path]:
    """A cache folder in which a kernel of cpp is the pick for A @ B, with the native look-up of this run of tests."""
    native = build.make()
    with settings.patch(
        cache_dir=str(tmp_path / "cache"), store_path=None, native=True, tune_in_subprocess=False, max_profiling_configs=1
    ) as chosen:
        cache_dir()
        (chosen.folder / "native").mkdir()
        shutil.copy2(native, chosen.folder / "native")  # beside it the run of tests may have modules of other sources
        gemmtune.tune("mm", A, B, progress=False)
        store = open_store(chosen)
        picked = [dataclasses.replace(row, time_us=0.02) for row in store.every_row() if row.backend == "cpp"]
        assert len(picked) == 1
        store.put(picked)
        (chosen.folder / "cpp" / "left.lock").touch()
        (chosen.folder / "locks" / "some.lock").touch()
        yield chosen.folder
    forget_plans()


def bundled(capsys: pytest.CaptureFixture[str], output: Path) -> dict[str, object]:
    assert cli.run(["bundle", "--output", str(output), "--json", "-"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def modes(folder: Path) -> dict[str, int]:
    """The files and folders below a folder, with their modes."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@pytest.mark.turn(7, 8)
@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_image_runs_what_was_tuned(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pack an archive and a folder, which have the same contents for everyone to read.
    archive, folder, unpacked = tmp_path / "one.tar.gz", tmp_path / "folder", tmp_path / "unpacked"
    data = bundled(capsys, archive)
    assert (data["files"], data["rows"], data["native_lookup"]) == (3, len(open_store(settings.current()).every_row()), True)
    bytes_before = archive.read_bytes()
    assert bundled(capsys, folder)["files"] == 3
    with tarfile.open(archive) as opened:
        assert {(member.uid, member.gid, member.mtime) for member in opened} == {(0, 0, 0)}
        opened.extractall(unpacked, filter="tar")
    native = str(Path(*build.module_file()))
    kernel = next(str(path.relative_to(tuned)) for path in (tuned / "cpp").glob("*.so"))
    expected = {"cpp": 0o755, "native": 0o755, kernel: 0o644, native: 0o644, "store.sqlite": 0o644}
    assert modes(unpacked) == modes(folder) == expected
    bundled(capsys, archive)
    assert archive.read_bytes() == bytes_before

    # Run from it, mounted read-only, without a compiler.
    def image() -> None:
        os.environ["PATH"] = str(tmp_path)
        runs_silently()
        assert not list((tmp_path / "temporary").iterdir())

    def runs_silently() -> None:
        forget_plans()
        with settings.patch(cache_dir=str(unpacked), tune="never"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.allclose(gemmtune.mm(A, B), A @ B, atol=1e-4)
            assert "cpp:" in str(gemmtune.explain("mm", A, B)).partition("\n")[0]
            assert build.made() == unpacked / native
            assert build.load().look_up is not None

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    mounted(image, {unpacked: MS_RDONLY})
    mounted(runs_silently, {unpacked: MS_RDONLY})  # a compiler changes nothing


def test_one_warning_says_what_cannot_run(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(tuned / "cpp")
    shutil.rmtree(tuned / "native")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(absent, "_said", [])
    for tune in ("never", "on_miss"):
        forget_plans()
        absent._said.clear()
        missing = r"the stored pick cannot run here: cpp:.*: no C\+\+ compiler on PATH .*aten:mm runs instead.*gemmtune bundle"
        with settings.patch(tune=tune), one_warning(rf"^mm 40x56x24 .*: {missing}"):
            for rows in (40, 39):
                assert torch.equal(gemmtune.mm(A[:rows], B), A[:rows] @ B)
    forget_plans()
    absent._said.clear()
    with settings.patch(choice_denylist_regex="^cpp:", tune="never"), warnings.catch_warnings():
        warnings.simplefilter("error")  # the settings leave it out
        gemmtune.mm(A, B)


def test_what_cannot_be_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with settings.patch(cache_dir=str(tmp_path / "cache"), store_path=None):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        for output, words in (
            (tmp_path / "full", "expected a new or empty folder, or a name that ends with .tar.gz"),
            (tmp_path / "full" / "file", "expected a new or empty folder, or a name that ends with .tar.gz"),
            (tmp_path / "missing" / "x.tar.gz", "cannot write"),
        ):
            assert cli.run(["bundle", "--output", str(output)]) == 1
            assert words in capsys.readouterr().err
        assert cli.run(["bundle", "--output", str(tmp_path / "x.tgz")]) == 0
        text = capsys.readouterr().out
        assert text == f"{tmp_path}/x.tgz: 0 files, 0.0 MiB; no store\nwithout the C++ look-up: the setting native is off\n"
        (tmp_path / "cache").chmod(0o777)
    (tmp_path / "empty").mkdir()
    with settings.patch(cache_dir=f"{tmp_path}/full/../cache", store_path=None):
        assert cli.run(["bundle", "--output", str(tmp_path / "y.tgz")]) == 1
        assert "others than its owner can write" in capsys.readouterr().err
    Store.open(tmp_path / "store.sqlite").close()
    with settings.patch(cache_dir=str(tmp_path / "other"), store_path=str(tmp_path / "store.sqlite")):
        for folder in (tmp_path / "new" / "folder", tmp_path / "empty"):
            assert cli.run(["bundle", "--output", str(folder)]) == 0
            assert modes(folder) == {"store.sqlite": 0o644}
        assert modes(tmp_path / "new") == {"folder": 0o755, "folder/store.sqlite": 0o644}


def test_triton_finds_its_modules_without_the_command_file(monkeypatch, tmp_path):
    """The names of Triton's compiled modules do not depend on that command, which slim images lack."""
    launchers = importlib.import_module(f"{kernels.toolchain().__name__}.runtime.build")
    names = []
    for path in ("/usr/bin:/bin", str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        kernels._platform_key.cache_clear()
        names.append(launchers.platform_key())
    assert names[0] == names[1]


def test_module_that_does_not_compile_is_an_error(monkeypatch, tmp_path):
    """``bundle`` never packs Triton's kernels without the module that launches them."""
    monkeypatch.setattr(kernels, "DRIVER", "raise RuntimeError('no compiler')")
    with pytest.raises(CompileError, match="no compiler"):
        kernels.keep_driver_module(tmp_path)
