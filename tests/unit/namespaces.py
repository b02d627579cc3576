"""Processes with file systems of their own: a folder mounted read-only or noexec, or of few bytes, for root and users alike."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from store_cases import fork, status_of

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 8, 32, 4096, 16384, 1 << 18
NOT_ALLOWED = 77
"""Exit status of a process that may not mount."""


def mounted(work: Callable[[], None], flags: Mapping[Path, int], *, sizes: Mapping[Path, int] = MappingProxyType({})) -> None:
    """Run ``work`` in a forked process in which folders are mounted with these flags, and see that it succeeds.

    ``sizes`` are the bytes of further folders, which are empty file systems.

    Skip the test where users may make no namespaces.
    """

    def inside() -> None:
        if not _mount(flags, sizes):
            os._exit(NOT_ALLOWED)
        work()

    status = status_of(fork(inside))
    if status == NOT_ALLOWED:
        pytest.skip("this user may make no user namespaces")
    assert status == 0, "the child failed; its traceback is in the captured output"


def _mount(flags: Mapping[Path, int], sizes: Mapping[Path, int]) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)) != 0:
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return False
    for folder, wanted in flags.items():
        name = os.fsencode(folder)
        if libc.mount(name, name, None, MS_BIND, None) or libc.mount(None, name, None, MS_REMOUNT | MS_BIND | wanted, None):
            return False
    return all(
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) == 0 for folder, size in sizes.items()
    )
