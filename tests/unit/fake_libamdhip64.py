"""A library in libamdhip64's place, compiled with HIP's own header: what a launch passes is what the runtime reads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton

from gemmtune.backends.ck.source import Work
from gemmtune.toolchain.hip import Hip

SOURCE = Path(__file__).with_suffix(".cpp")


class Launched(ctypes.Structure):
    """One launch as the fake has seen it."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint), ("device", ctypes.c_int),
        ("extra", ctypes.c_int), ("stream", ctypes.c_void_p), ("function", ctypes.c_void_p), ("argument", ctypes.c_ubyte * 4096),
    ]  # fmt: skip

    @property
    def work(self) -> Work:
        """What the kernel was told."""
        return Work.from_buffer_copy(bytes(self.argument))


@dataclass
class FakeHip:
    """``hip`` is gemmtune's, on top of the fake ``library`` at ``path``."""

    path: Path
    library: ctypes.CDLL
    hip: Hip

    @classmethod
    def of(cls, library: Path, folder: Path) -> FakeHip:
        """A copy of the shared object in ``folder``, which remembers nothing of another one."""
        path = Path(shutil.copy(library, folder))
        loaded = ctypes.CDLL(str(path))
        loaded.fake_launch.restype = ctypes.POINTER(Launched)
        ctypes.c_int.in_dll(loaded, "fake_argument_bytes").value = ctypes.sizeof(Work)
        return cls(path=path, library=loaded, hip=Hip(loaded))

    @property
    def launched(self) -> list[Launched]:
        """Every launch so far."""
        return [self.library.fake_launch(i).contents for i in range(self.library.fake_count())]

    def refuses(self, function: str, status: int = 719) -> None:
        """That function gives this status from now on."""
        self.library.fake_fail(function.encode(), status)


def compiled(folder: Path) -> Path:
    """The fake as a shared object in ``folder``."""
    include = Path(triton.__file__).parent / "backends/amd/include"
    if not (include / "hip/hip_runtime_api.h").exists() or shutil.which("g++") is None:
        pytest.skip("needs g++ and Triton's copy of HIP's headers")
    path = folder / "libamdhip64.so"
    flags = ["-std=c++17", "-w", "-shared", "-fPIC", "-D__HIP_PLATFORM_AMD__", f"-I{include}"]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(path)], check=True)
    return path
