"""A cache folder that cannot be used, or not for new files, costs a warning at most, and no call."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from namespaces import MS_NOEXEC, MS_RDONLY, mounted
from store_cases import NOBODY, in_child, one_warning

import gemmtune
from gemmtune import cache, settings
from gemmtune.cache import cache_dir, cached, folder_of, present, refuse, why_nothing_new
from gemmtune.errors import UnavailableError
from gemmtune.store.store import open_store

FOR_NOW = r"; new compiled kernels go to .*temporary/gemmtune-\d+ for now\. Otherwise set cache_dir \(GEMMTUNE_CACHE_DIR\) to "


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, the test's own. ``open_folder`` lies in the machine's."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def unusable(tmp_path: Path) -> Path:
    """A path below a regular file, which nobody can make a folder of."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def silently(work: Callable[[], object]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return work()


def untrusted(folder: Path) -> Path:
    """Let others write the folder."""
    folder.chmod(0o777)
    return folder


def test_new_files_go_to_a_temporary_folder_with_one_warning(unusable: Path, temporary: Path) -> None:
    with settings.patch(cache_dir=str(unusable)):
        path = silently(lambda: cached("cpp", "kernel.so"))
        assert path == temporary / f"gemmtune-{os.getuid()}" / "cpp" / "kernel.so"
        with one_warning(r"cache_dir: got .*file/cache, expected a writable folder \(.*Not a directory.*\)" + FOR_NOW):
            folder = cache_dir("cpp")
        assert folder == path.parent
        assert silently(lambda: cache_dir("cpp")) == folder
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_sticky_folder_of_all_users_is_not_used_below_either(tmp_path: Path, temporary: Path) -> None:
    """Nobody else could change a folder that is made there, but the store beside it is not used, and one warning says so."""
    folder = tmp_path / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    with settings.patch(cache_dir=str(folder)), one_warning(r"which is not used, .* \(mode 1777\).*" + FOR_NOW):
        assert cache_dir("cpp") == temporary / f"gemmtune-{os.getuid()}" / "cpp"
    assert not list(folder.iterdir())


@pytest.mark.parametrize("taken", ["file", "link", "open to all", "everything"])
def test_whoever_makes_the_temporary_folder_first_stops_nothing(
    unusable: Path, temporary: Path, tmp_path: Path, taken: str
) -> None:
    name = f"gemmtune-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    if taken == "file":
        (temporary / name).touch()
    elif taken == "link":
        (temporary / name).symlink_to(tmp_path / "elsewhere")
    else:
        (temporary / name).mkdir()
        untrusted(temporary / name)
    if taken == "everything":
        for i in range(3):
            (temporary / f"{name}-{i}").mkdir()
            untrusted(temporary / f"{name}-{i}")
    with settings.patch(cache_dir=str(unusable)):
        with pytest.warns(RuntimeWarning, match="new compiled kernels go to"):
            folder = cache_dir("cpp")
        assert cache_dir("cpp") == folder  # every process finds it
    assert folder.parent.parent == temporary
    assert folder.parent.name.startswith(f"{name}-")
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert not list((tmp_path / "elsewhere").iterdir())


def test_without_any_folder_torch_runs(unusable: Path, temporary: Path) -> None:
    untrusted(temporary)
    a, b = torch.randn(40, 24), torch.randn(24, 56)
    with settings.patch(cache_dir=str(unusable), search="quick"):
        words = r"and no temporary folder can be used instead: set cache_dir \(GEMMTUNE_CACHE_DIR\) to a folder of yours"
        reason = silently(lambda: why_nothing_new("cpp"))
        assert reason is not None
        with pytest.raises(UnavailableError, match=words), pytest.warns(RuntimeWarning, match="no kernel can be compiled"):
            cache_dir("cpp")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.allclose(gemmtune.mm(a, b), a @ b, atol=1e-4)
    assert [str(w.message)[:6] for w in caught if "cache_dir: got" in str(w.message)] == []
    with settings.patch(cache_dir=str(unusable), search="quick"):
        assert "aten:mm (the only choice)" in str(gemmtune.explain("mm", a, b))


@pytest.mark.parametrize("changed", ["mine", "mine/kernels", "mine/kernels/cpp"])
def test_nothing_is_read_from_a_folder_that_others_can_write(tmp_path: Path, temporary: Path, changed: str) -> None:
    (tmp_path / "mine" / "kernels" / "cpp").mkdir(parents=True)
    (tmp_path / "mine" / "kernels" / "cpp" / "kernel.so").write_text("of somebody else")
    where = untrusted(tmp_path / changed)
    words = rf"cache_dir: got {tmp_path}/mine, which is not used, expected a folder that only this user and root can change, "
    with settings.patch(cache_dir=str(tmp_path / "mine")):
        with one_warning(words + rf".*: others than its owner can write {where} \(mode 777\)\. .* chmod go-w {where}" + FOR_NOW):
            path = cached("kernels", "cpp", "kernel.so")
        assert path.is_relative_to(temporary)
        assert not present(path)
        assert silently(lambda: cache_dir("kernels", "cpp")) == path.parent


def test_store_of_a_folder_that_others_can_write_is_not_read(tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path / "mine"), store_path=None) as chosen:
        chosen.folder.mkdir()
        chosen.store_file.write_text("whatever somebody else wrote")
        untrusted(chosen.folder)
        with one_warning("cache_dir: got .*mine, which is not used"):
            health = open_store(chosen).health()
            cached("cpp", "kernel.so")
        assert (health.state, health.detail) == ("memory", folder_of(chosen).advice)
        assert chosen.store_file.read_text() == "whatever somebody else wrote"


def test_file_that_others_can_write_or_that_was_refused_is_missing(tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path / "mine")):
        path = cache_dir("cpp") / "kernel.so"
        path.touch(0o644)
        assert present(path)
        path.chmod(0o666)
        assert not present(path)
        path.chmod(0o644)
        refuse(path)
        assert not present(path)
        path.with_suffix(".new").write_text("another")
        path.with_suffix(".new").replace(path)
        assert present(path)
        assert cached("cpp", "kernel.so") == path


def test_read_only_folder_is_read_and_new_files_go_elsewhere(open_folder: Path) -> None:
    kernels = open_folder / "cache" / "cpp"
    kernels.mkdir(parents=True)
    (kernels / "old.so").touch(0o644)
    temporary = open_folder / "temporary"
    temporary.mkdir()
    temporary.chmod(0o1777)
    kernels.chmod(0o555)
    kernels.parent.chmod(0o555)

    def work() -> None:
        tempfile.tempdir = str(temporary)
        with settings.patch(cache_dir=str(kernels.parent)):
            assert silently(lambda: cached("cpp", "old.so")) == kernels / "old.so"
            own = temporary / f"gemmtune-{os.getuid()}"
            assert silently(lambda: cached("cpp", "new.so")) == own / "cpp" / "new.so"
            assert silently(lambda: cached("cuda", "new.cubin")) == own / "cuda" / "new.cubin"
            with one_warning(r"expected a writable folder \(it is read-only\); new compiled kernels go to"):
                (cache_dir("cpp") / "new.so").touch()
                cache_dir("cuda")
            assert present(cached("cpp", "new.so"))
            refuse(kernels / "old.so")  # a damaged file is made anew elsewhere
            assert silently(lambda: cached("cpp", "old.so")) == own / "cpp" / "old.so"

    in_child(work, user=NOBODY)
    kernels.parent.chmod(0o755)
    kernels.chmod(0o755)


@pytest.mark.parametrize("flag", [MS_RDONLY, MS_NOEXEC])
def test_file_systems(tmp_path: Path, temporary: Path, flag: int) -> None:
    """A read-only file system is read by root too. Nothing is loaded from one without execution, and its store is still read."""
    folder = tmp_path / "cache"
    (folder / "cpp").mkdir(parents=True)
    (folder / "cpp" / "kernel.so").touch(0o644)

    def work() -> None:
        with settings.patch(cache_dir=str(folder), store_path=None) as chosen, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, new = cached("cpp", "kernel.so"), cache_dir("cpp")
            assert new == temporary / f"gemmtune-{os.getuid()}" / "cpp"
            assert found == (folder if flag == MS_RDONLY else new.parent) / "cpp" / "kernel.so"
            assert len(caught) == 1
            words = "(it is read-only)" if flag == MS_RDONLY else "kernels can be loaded from: it is mounted noexec"
            assert words in str(caught[0].message)
            if flag == MS_NOEXEC:
                assert open_store(chosen).health().state == "file"

    mounted(work, {folder: flag})


def test_temporary_folder_without_execution_is_not_used(unusable: Path, temporary: Path) -> None:
    def work() -> None:
        with settings.patch(cache_dir=str(unusable)):
            assert why_nothing_new("cpp") is not None

    mounted(work, {temporary: MS_NOEXEC})


def test_removed_folder_is_made_again(tmp_path: Path) -> None:
    with settings.patch(cache_dir=str(tmp_path / "mine")):
        shutil.rmtree(cache_dir("cpp").parent)
        assert cache_dir("cpp").is_dir()


@pytest.mark.parametrize("make", [lambda: cache_dir("cpp"), lambda: open_store(settings.current()).path.parent])
def test_new_folders_are_private_regardless_of_umask(tmp_path: Path, make) -> None:
    before = os.umask(0)
    try:
        with settings.patch(cache_dir=str(tmp_path / "above" / "mine")):
            made = make()
    finally:
        os.umask(before)
    while made != tmp_path:
        assert stat.S_IMODE(made.stat().st_mode) == 0o700, made
        made = made.parent


@pytest.mark.turn(6, 8)
def test_a_call_tunes_and_runs_without_it(unusable: Path) -> None:
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


def test_other_processes_of_this_user_find_the_temporary_folder(unusable: Path) -> None:
    with settings.patch(cache_dir=str(unusable)):
        with pytest.warns(RuntimeWarning):
            folder = cache_dir("cpp")

        def work() -> None:
            cache._warned.clear()
            assert cache_dir("cpp") == folder

        in_child(work)
