"""A library in libcuda's place, compiled with CUDA's own header: what a launch passes is what the driver reads."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemmtune.toolchain.driver import Driver
from gemmtune.toolchain.nvcc import toolkit_folders
from gemmtune.toolchain.record import MAP_BYTES, Record

SOURCE = Path(__file__).with_suffix(".cpp")


class Map(ctypes.Structure):
    """What the fake writes into a CUtensorMap."""

    _fields_ = [
        ("type", ctypes.c_int), ("rank", ctypes.c_int), ("address", ctypes.c_uint64), ("sizes", ctypes.c_uint64 * 5),
        ("pitches", ctypes.c_uint64 * 4), ("box", ctypes.c_uint32 * 5), ("interleave", ctypes.c_int), ("swizzle", ctypes.c_int),
        ("promotion", ctypes.c_int), ("fill", ctypes.c_int),
    ]  # fmt: skip


class Launched(ctypes.Structure):
    """One launch as the fake has seen it."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint), ("cluster", ctypes.c_uint * 3),
        ("overlaps", ctypes.c_int), ("attributes", ctypes.c_int), ("stream", ctypes.c_void_p), ("function", ctypes.c_void_p),
        ("arguments", (ctypes.c_ubyte * 4096) * 4),
    ]  # fmt: skip


@dataclass
class FakeCuda:
    """``driver`` is gemmtune's, on top of the fake ``library``."""

    library: ctypes.CDLL
    driver: Driver

    def expects(self, sizes: Sequence[int]) -> None:
        """Launches have arguments of so many bytes."""
        (ctypes.c_int * 4).in_dll(self.library, "fake_argument_bytes")[:] = (*sizes, *[0] * (4 - len(sizes)))

    def expects_launch(self, record: Record) -> None:
        """Launches have the arguments of that record."""
        ends = [*record.arguments[1:], len(record.parameters)]
        self.expects([end - start for start, end in zip(record.arguments, ends, strict=True)])

    @property
    def launched(self) -> list[Launched]:
        """Every launch so far."""
        return [self.library.fake_launch(i).contents for i in range(self.library.fake_count())]

    def maps(self, launched: Launched, count: int) -> list[Map]:
        """The tensor maps of a launch."""
        return [Map.from_buffer_copy(launched.arguments[0], i * MAP_BYTES) for i in range(count)]


def include_folder() -> Path | None:
    """Where cuda.h is: in triton's package or in a CUDA toolkit."""
    import triton

    folders = [Path(triton.__file__).parent / "backends/nvidia/include", *(folder / "include" for folder in toolkit_folders())]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


@functools.cache
def _library() -> bytes:
    """The fake as a shared object."""
    include = include_folder()
    if include is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and cuda.h")
    with tempfile.NamedTemporaryFile(suffix=".so") as made:
        flags = ["-std=c++17", "-w", "-shared", "-fPIC", f"-I{include}"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", made.name], check=True)
        return Path(made.name).read_bytes()


def compiled(folder: Path) -> FakeCuda:
    """A copy of the fake in ``folder``; it remembers nothing of another one."""
    path = folder / "libcuda.so"
    path.write_bytes(_library())
    library = ctypes.CDLL(str(path))
    library.fake_launch.restype = ctypes.POINTER(Launched)
    return FakeCuda(library=library, driver=Driver(library))
