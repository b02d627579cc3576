"""A compiler in nvcc's place: it notes its runs, and makes shared objects that have the functions of a compiled operation."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gemmtune import settings
from gemmtune.backends.cpp.compiler import find_compiler
from gemmtune.toolchain import nvcc
from gemmtune.workers.pool import WORKERS

FUNCTIONS = """
extern "C" int gemmtune_check(void const*) { return 5; }
extern "C" int gemmtune_prepare() { return 0; }
extern "C" long long gemmtune_workspace_bytes(void const*) { return 0; }
extern "C" int gemmtune_launch(void const*, void*) { return 0; }
extern "C" int gemmtune_call(void const*, void const*) { return 0; }
extern "C" unsigned long long gemmtune_capture(void*) { return 0; }
extern "C" int gemmtune_threads() { return 384; }
extern "C" int gemmtune_shared_bytes() { return 200000; }
"""
SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {release}, V{release}.1"; exit 0; fi
echo run >> {folder}/runs
sleep {seconds}
{body}
"""


@functools.cache
def _functions() -> bytes:
    """The shared object, compiled once for all tests."""
    found = find_compiler()
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "made.cpp"), Path(folder, "made.so")
        source.write_text(FUNCTIONS)
        subprocess.run([found.path, "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        return made.read_bytes()


class FakeNvcc:
    """The nvcc that is found first on PATH, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "bin" / "nvcc"
        self.path.parent.mkdir()
        self.made = folder / "made.so"

    @property
    def runs(self) -> int:
        """Compilations so far."""
        noted = self.folder / "runs"
        return len(noted.read_text().splitlines()) if noted.exists() else 0

    def compiles(self, seconds: float = 0.0, release: str = "12.8") -> None:
        """Whatever it is given becomes the same shared object."""
        self.made.write_bytes(_functions())
        self.does(f'for last; do :; done\ncp {self.made} "$last"', seconds, release)

    def refuses(self, text: str, lines: int = 1) -> None:
        """It prints ``text`` and a number so many times, and ends with 2."""
        self.does(f'for i in $(seq {lines}); do echo "{text} $i" >&2; done\nexit 2')

    def remove(self) -> None:
        """There is no nvcc."""
        self.path.unlink()

    def does(self, body: str, seconds: float = 0.0, release: str = "12.8") -> None:
        """Compiling is what this shell script does."""
        self.path.write_text(SCRIPT.format(folder=self.folder, body=body, seconds=seconds, release=release))
        self.path.chmod(0o755)


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvcc]:
    """A fake that compiles, found before any other nvcc; none other is looked for, and the cache folder is below ``folder``."""
    fake = FakeNvcc(folder)
    monkeypatch.setenv("PATH", f"{fake.path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(nvcc, "WHERE_NVCC", ())
    fake.compiles()
    WORKERS.close()  # workers have the PATH of their start
    with settings.patch(cache_dir=str(folder / "cache")):
        yield fake
    WORKERS.close()
