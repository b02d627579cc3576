"""Folders and files that code is loaded from: who could change them."""

from __future__ import annotations

import ctypes
import encodings.ascii  # noqa: F401 - a process of another user may not read the modules of this Python
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from namespaces import CLONE_NEWUSER
from store_cases import NOBODY, in_child

from gemmtune.cache import ownership
from gemmtune.cache.ownership import others_write, trusted_file, why_not_trusted

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
STRANGER = 12345
PR_SET_DUMPABLE = 4


def change(path: Path, mode: int) -> None:
    """Change a mode. Root's group becomes one with other members, because a group of root alone counts as root."""
    if os.getuid() == 0:
        os.chown(path, 0, 1)
    path.chmod(mode)


@pytest.mark.parametrize(
    ("changed", "mode", "trusted"),
    [
        ("cache", 0o700, True),
        ("cache", 0o755, True),
        ("cache", 0o777, False),
        ("cache", 0o1777, False),  # others could put files there
        ("cache", 0o702, False),
        ("above", 0o755, True),
        ("above", 0o777, False),
        ("above", 0o1777, True),
    ],
)
def test_mode_of_a_folder_and_of_those_above_it(tmp_path: Path, changed: str, mode: int, trusted: bool) -> None:
    folders = {"above": tmp_path / "above", "cache": tmp_path / "above" / "cache"}
    for folder in folders.values():
        folder.mkdir()
    change(folders[changed], mode)
    link = tmp_path / "link"
    link.symlink_to(folders["cache"], target_is_directory=True)
    for way in (folders["cache"], link, folders["cache"] / "not" / "there"):
        if way.exists() or changed == "above":
            reason = why_not_trusted(way)
            got = f"others than its owner can write {folders[changed]} (mode {mode:o}). If you trust its contents, chmod go-w "
            assert reason == (None if trusted else f"{got}{folders[changed]}")


def test_group_counts_unless_it_is_the_owners_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o664)
    for members, name, alone in (([], "one", True), (["one"], "one", True), (["two"], "one", False), ([], "users", False)):
        ownership._own_group.cache_clear()
        status = file.stat()
        owner = pwd.struct_passwd(("one", "x", status.st_uid, status.st_gid, "", "/", "/bin/sh"))
        monkeypatch.setattr("pwd.getpwuid", lambda _, owner=owner: owner)
        monkeypatch.setattr(
            "grp.getgrgid", lambda _, name=name, members=members: type("G", (), {"gr_name": name, "gr_mem": members})
        )
        assert others_write(file.stat(), file) is not alone, (members, name)
        assert (trusted_file(file) is not None) is alone
    monkeypatch.setattr("os.listxattr", lambda _: [ownership.ACCESS_LIST])
    assert others_write(file.stat(), file)
    ownership._own_group.cache_clear()


@needs_root
@pytest.mark.parametrize(
    ("owners", "user", "trusted"),
    [
        ((0, 0, 0), NOBODY, True),
        ((0, NOBODY, NOBODY), NOBODY, True),
        ((0, NOBODY, NOBODY), 0, False),
        ((STRANGER, 0, 0), 0, False),
        ((STRANGER, NOBODY, NOBODY), NOBODY, False),
        ((0, STRANGER, STRANGER), NOBODY, False),
        ((0, 0, STRANGER), NOBODY, False),
    ],
)
def test_owners_are_this_user_or_root(open_folder: Path, owners: tuple[int, int, int], user: int, trusted: bool) -> None:
    above = open_folder / "above"
    cache, file = above / "cache", above / "cache" / "kernel.so"
    cache.mkdir(parents=True)
    file.touch()
    for path, owner in zip((above, cache, file), owners, strict=True):
        os.chown(path, owner, owner)
        path.chmod(0o755)

    def work() -> None:
        reason, status = why_not_trusted(cache), trusted_file(file)
        assert ((reason is None) and (status is not None)) is trusted, (reason, status)
        if reason is not None:
            assert "belongs to the user " in reason
            assert reason.endswith("If you trust its contents, chown it to root or to the user who runs this")

    in_child(work, user=user or None)


@needs_root
def test_folders_of_an_unmapped_root_count_as_roots(open_folder: Path) -> None:
    """A user namespace that maps one user shows root's ``/`` as nobody's, and still nobody else can change it."""
    mine = open_folder / "mine"
    mine.mkdir()
    os.chown(mine, STRANGER, STRANGER)

    def work(check: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a process that changed its user may not write its own map
        assert libc.unshare(CLONE_NEWUSER) == 0
        Path("/proc/self/uid_map").write_text(f"{STRANGER} {STRANGER} 1")
        check()

    def check() -> None:
        assert Path("/").stat().st_uid == ownership._unmapped_root() != 0
        assert why_not_trusted(mine) is None
        assert why_not_trusted(open_folder) is not None  # itself of root, or of anybody else

    assert ownership._unmapped_root() is None
    ownership._unmapped_root.cache_clear()
    in_child(lambda: work(check), user=STRANGER)


def test_only_regular_files_count(tmp_path: Path) -> None:
    assert trusted_file(tmp_path) is None
    assert trusted_file(tmp_path / "missing") is None
    (tmp_path / "file").touch(0o600)
    assert trusted_file(tmp_path / "file") is not None
    change(tmp_path / "file", 0o666)
    assert trusted_file(tmp_path / "file") is None
