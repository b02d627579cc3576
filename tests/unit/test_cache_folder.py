"""A cache folder that cannot be used costs a warning, not the call."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest
import torch

import gemmtune
from gemmtune import cache, settings
from gemmtune.cache import cache_dir
from gemmtune.store.store import open_store


@pytest.fixture
def unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path below a regular file, which nobody can make a folder of; temporary files go to a folder of the test's own."""
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "file" / "cache"


def test_kernels_go_to_a_temporary_folder_with_one_warning(unusable: Path, tmp_path: Path):
    with settings.patch(cache_dir=str(unusable)):
        with pytest.warns(RuntimeWarning, match=r"cache_dir: got .*file/cache, expected a writable folder .* Set cache_dir"):
            folder = cache_dir("cpp")
        assert folder.is_dir()
        assert folder.is_relative_to(tmp_path / "temporary")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cache_dir("cpp") == folder


def test_a_folder_that_others_can_write_is_refused(unusable: Path, tmp_path: Path):
    with settings.patch(cache_dir=str(unusable)), pytest.warns(RuntimeWarning):
        shared = cache_dir()
    shared.chmod(0o777)
    cache._writable.cache_clear()
    with (
        settings.patch(cache_dir=str(unusable)),
        pytest.raises(gemmtune.SettingsError, match="is not a folder that only this user"),
    ):
        cache_dir()


@pytest.mark.parametrize("folder", ["mine", "mine/kernels/cpp"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_kernels_are_not_loaded_from_a_folder_that_others_can_write(tmp_path: Path, folder: str, mode: int):
    with settings.patch(cache_dir=str(tmp_path / "mine")):
        cache_dir("kernels", "cpp")
        (tmp_path / folder).chmod(mode)
        with pytest.raises(gemmtune.SettingsError) as caught:
            cache_dir("kernels", "cpp")
    assert str(caught.value) == (
        f"cache_dir: got {tmp_path / folder}, which others than its owner can write (mode {mode:o}), expected a folder that "
        f"nobody else can: kernels are loaded from it. If you trust what is in it, chmod go-w {tmp_path / folder}; else set "
        "cache_dir (GEMMTUNE_CACHE_DIR) to another folder"
    )


@pytest.mark.parametrize("make", [lambda: cache_dir("cpp"), lambda: open_store(settings.current()).path.parent])
def test_new_folders_are_private_regardless_of_umask(tmp_path: Path, make):
    before = os.umask(0)
    try:
        with settings.patch(cache_dir=str(tmp_path / "above" / "mine")):
            made = make()
    finally:
        os.umask(before)
    while made != tmp_path:
        assert stat.S_IMODE(made.stat().st_mode) == 0o700, made
        made = made.parent


def test_a_call_tunes_and_runs_without_it(unusable: Path):
    a, b = torch.randn(40, 24), torch.randn(24, 56)
    with (
        settings.patch(cache_dir=str(unusable), search="quick", tune_in_subprocess=False),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.allclose(gemmtune.mm(a, b), a @ b, atol=1e-4)
    assert all("got" in str(w.message) for w in caught if w.category is RuntimeWarning)
    assert sum("cache_dir: got" in str(w.message) for w in caught) == 1
