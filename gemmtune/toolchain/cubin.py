"""Cubins out of device code: content-addressed files in the cache folder, compiled once, by NVRTC or else by nvcc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cache import cache_dir
from ..errors import UnavailableError
from .made_once import compile_text, made_once
from .nvcc import find_compiler
from .nvrtc import find_nvrtc

__all__ = ["CubinCompiler", "cubin_path", "find_cubin_compiler", "make_cubin"]

FLAGS = ("-std=c++17", "-DNDEBUG")
REMEDY = (
    "install NVRTC (pip install nvidia-cuda-nvrtc) or the CUDA toolkit, or compile on a machine that has one of them "
    "(gemmtune build)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinCompiler:
    """What makes cubins here. ``compile`` takes a text, the architecture, the file to write and a name for errors."""

    name: str
    compile: Callable[[str, str, Path, str], None]


def find_cubin_compiler() -> CubinCompiler:
    """NVRTC, which takes a fifth of nvcc's time, or else nvcc. Raises UnavailableError: there is neither."""
    reasons = []
    for find in (_nvrtc, _nvcc):
        try:
            return find()
        except UnavailableError as error:
            reasons.append(str(error))
    raise UnavailableError(f"no compiler for CUDA C++ ({'; '.join(reasons)}): {REMEDY}")


def _nvrtc() -> CubinCompiler:
    found = find_nvrtc()

    def compile_with_nvrtc(text: str, arch: str, made: Path, name: str) -> None:
        made.write_bytes(found.cubin(text, [*FLAGS, f"--gpu-architecture={arch}"], name))

    return CubinCompiler(name=str(found), compile=compile_with_nvrtc)


def _nvcc() -> CubinCompiler:
    found = find_compiler()

    def compile_with_nvcc(text: str, arch: str, made: Path, name: str) -> None:
        compile_text([found.path, *FLAGS, "-cubin", "-w", f"-arch={arch}"], text, ".cu", made, name)

    return CubinCompiler(name=f"nvcc {found.cuda}", compile=compile_with_nvcc)


def cubin_path(folder: str, digest: str) -> Path:
    """The file of a source's cubin, made or not. It is not named by the compiler: what another machine made is used as it is."""
    return cache_dir(folder) / f"{digest}.cubin"


def make_cubin(path: Callable[[], Path], text: Callable[[], str], arch: str, name: str) -> Path:
    """The cubin at ``path()``, made out of ``text()`` if it is missing. Of several processes that need it, one compiles.

    Raises:
        CompileError: the compiler refused the source, or the cache folder cannot be written.
        UnavailableError: it is missing, and there is no compiler.
    """
    return made_once(path, lambda made: find_cubin_compiler().compile(text(), arch, made, name), name)
