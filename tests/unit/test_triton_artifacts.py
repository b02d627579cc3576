"""Triton's artifacts in our cache folder: whole or not there, wherever the folder lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from gemmtune import settings
from gemmtune.backends.triton import BACKEND
from gemmtune.device import preset
from gemmtune.problem import Problem
from gemmtune.settings import Settings
from gemmtune.toolchain.triton_artifacts import FOLDER, Artifacts, manager

pytest.importorskip("triton", reason="the artifacts are Triton's")
DAMAGE = {"empty": b"", "truncated": b"{", "other": b"something else", "removed": None}


def damaged(path: Path, content: bytes | None) -> None:
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def filled(chosen: Settings) -> Path:
    """The folder of a group of two files."""
    made = Artifacts("KEY")
    group = {name: made.put(data, name) for name, data in {"k.cubin": b"\x7fELF", "k.json": "{}"}.items()}
    made.put_group("k.json", group)
    return chosen.folder.joinpath(*FOLDER, "KEY")


def test_a_group_is_whole_or_missing(tmp_path: Path) -> None:
    for what, content in DAMAGE.items():
        for name in ("k.cubin", "k.json", "__grp__k.json"):
            with settings.patch(cache_dir=str(tmp_path / what / name)) as chosen:
                folder = filled(chosen)
                expected = {"k.cubin": str(folder / "k.cubin"), "k.json": str(folder / "k.json")}
                assert Artifacts("KEY").get_group("k.json") == expected
                assert sorted(path.name for path in folder.iterdir()) == ["__grp__k.json", "k.cubin", "k.json"]
                damaged(folder / name, content)
                assert Artifacts("KEY").get_group("k.json") is None, (what, name)
                filled(chosen)
                assert Artifacts("KEY").get_group("k.json") == expected, (what, name)


def test_a_copied_folder_has_its_groups(tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path / "one")) as chosen:
        folder = filled(chosen)
        assert str(tmp_path) not in (folder / "__grp__k.json").read_text()
    shutil.move(tmp_path / "one", tmp_path / "two")
    with settings.patch(cache_dir=str(tmp_path / "two")):
        found = Artifacts("KEY").get_group("k.json")
        assert found is not None
        assert Path(found["k.cubin"]).read_bytes() == b"\x7fELF"
        assert not (tmp_path / "one").exists()
        assert Artifacts("ANOTHER").get_group("k.json") is None
        assert not Artifacts("KEY").has_file("missing")


def test_a_damaged_module_is_missing(tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path)):
        made = Artifacts("KEY")
        path = Path(made.put(b"\x7fELF" + bytes(60), "cuda_utils.so"))
        assert made.get_file("cuda_utils.so") == str(path)
        damaged(path, b"")
        assert made.get_file("cuda_utils.so") is None


def test_triton_keeps_its_own_files_of_overrides_and_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path))
    assert type(manager("KEY", dump=True)).__name__ == "FileCacheManager"


@pytest.mark.turn(4, 8)
@pytest.mark.slow
def test_damaged_kernels_are_compiled_anew_and_moved_ones_are_not(tmp_path: Path) -> None:
    problem = Problem.mm(64, 64, 64, dtype=torch.float16, device_type="cuda")
    with settings.patch(cache_dir=str(tmp_path / "one")) as chosen:
        choice = BACKEND.enumerate(problem, preset("sm80"), chosen).choices[0]
        assert not choice.compiled
        choice.compile()
        assert choice.compiled
        files = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*.*") if path.is_file()}
        [cubin] = [path for path in files if path.suffix == ".cubin"]
        [source] = [path for path in files if path.suffix == ".py"]
        for path in (cubin, source):
            damaged(path, files[path][:100])
            choice.compile()
            assert path.read_bytes() == files[path]
    shutil.move(tmp_path / "one", tmp_path / "two")
    before = {path: path.stat().st_ino for path in (tmp_path / "two").rglob("*.*")}
    with settings.patch(cache_dir=str(tmp_path / "two")):
        assert choice.compiled
        choice.compile()
    assert {path: path.stat().st_ino for path in (tmp_path / "two").rglob("*.*")} == before
