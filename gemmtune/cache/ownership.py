"""Ownership of files and folders that code is loaded from: nobody but this user and root may be able to change them."""

import functools
import grp
import os
import pwd
import stat
from pathlib import Path

ACCESS_LIST = "system.posix_acl_access"
"""Extended attribute with the further users and groups that may write."""


def why_not_trusted(folder: Path) -> str | None:
    """Return who else could change the contents of a folder, and a remedy; None if nobody could.

    The folder belongs to this user or to root, and so does each folder above it. Of these others may write only sticky ones, such
    as ``/tmp``, where nobody can rename what is not theirs. Missing folders do not count.
    """
    path = Path(os.path.realpath(folder))
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        above = place != path
        if not _owned(status, above=above):
            owner = _user_name(status.st_uid)
            return f"{place} belongs to {owner}. If you trust its contents, chown it to root or to the user who runs this"
        if others_write(status, place) and not (above and status.st_mode & stat.S_ISVTX):
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            return f"others than its owner can write {place} (mode {mode}). If you trust its contents, chmod go-w {place}"
    return None


def trusted_file(path: Path) -> os.stat_result | None:
    """Return the status of a regular file that this user or root owns and nobody else can write; otherwise None."""
    try:
        status = path.stat()
    except OSError:
        return None
    safe = stat.S_ISREG(status.st_mode) and _owned(status, above=False) and not others_write(status, path)
    return status if safe else None


def others_write(status: os.stat_result, path: Path) -> bool:
    """Return True if users other than the owner can write. A group with no other member, such as a user's own, does not count."""
    if not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
    return bool(status.st_mode & stat.S_IWOTH) or not _own_group(status.st_uid, status.st_gid) or _has_access_list(path)


def _owned(status: os.stat_result, *, above: bool) -> bool:
    return status.st_uid in (0, os.geteuid()) or (above and status.st_uid == _unmapped_root())


@functools.cache
def _own_group(user: int, group: int) -> bool:
    try:
        owner, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return owner.pw_gid == group and owner.pw_name == found.gr_name and set(found.gr_mem) <= {owner.pw_name}


def _has_access_list(path: Path) -> bool:
    try:
        return ACCESS_LIST in os.listxattr(path)
    except OSError:  # a file system without attributes
        return False


@functools.cache
def _unmapped_root() -> int | None:
    """Return the number that stands for root's files in a user namespace that lacks this user; None outside of such a one."""
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
        if any(int(outside) == 0 for _, outside, _ in ranges):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _user_name(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"the user {user}"
