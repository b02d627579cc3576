"""NVRTC, the CUDA compiler that is a library: torch's CUDA wheels bring it, as does the package nvidia-cuda-nvrtc."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CompileError, UnavailableError
from .nvcc import toolkit_folders

__all__ = ["LEAST_CUDA", "Nvrtc", "find_nvrtc", "libraries"]

LEAST_CUDA = (12, 3)
"""The first CUDA version that compiles what we have for SM90."""
NAME = re.compile(r"libnvrtc\.so\.(\d+)[\d.]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvrtc:
    """The library at ``path``."""

    path: Path

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version of the library such as (13, 0). Raises OSError: it cannot be loaded."""
        major, minor = c_int(), c_int()
        _library(self.path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    def cubin(self, text: str, options: Sequence[str], name: str) -> bytes:
        """The cubin of a source without includes. Raises CompileError of ``name``, with the end of what the compiler said."""
        library, program = _library(self.path), c_void_p()
        made = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        if made:
            raise CompileError(name, f"NVRTC: {_message(library, made)}")
        try:
            told = (c_char_p * len(options))(*(option.encode() for option in options))
            status = library.nvrtcCompileProgram(program, len(options), told)
            if status:
                log = _read(library, program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
                raise CompileError(name, log or f"NVRTC: {_message(library, status)}")
            return _read(library, program, "nvrtcGetCUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


def find_nvrtc() -> Nvrtc:
    """The NVRTC of this machine: of torch's CUDA version where there are several, since the driver is known to load its cubins.

    Raises:
        UnavailableError: there is none, or only older ones than are needed.
    """
    return _first(tuple(libraries()))


@functools.cache
def _first(paths: tuple[Path, ...]) -> Nvrtc:
    reasons = []
    for path in paths:
        found = Nvrtc(path=path)
        try:
            version = found.version
        except OSError as error:
            reasons.append(f"{path} cannot be loaded: {error}")
            continue
        if version >= LEAST_CUDA:
            return found
        reasons.append(f"{path}: got CUDA {version[0]}.{version[1]}, expected {LEAST_CUDA[0]}.{LEAST_CUDA[1]} or newer")
    raise UnavailableError("; ".join(reasons) or "there is no libnvrtc")


def libraries() -> list[Path]:
    """Every libnvrtc beside torch's packages or in a CUDA toolkit, the likeliest first."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    folders = [lib for package in packages for lib in sorted(package.glob("*/lib"))]
    folders += [folder / lib for folder in toolkit_folders() for lib in ("lib64", "targets/x86_64-linux/lib", "lib")]
    found = {path.resolve(): int(name[1]) for path in _files(folders) if (name := NAME.search(path.name))}
    wanted = int((torch.version.cuda or "0").split(".")[0])
    return sorted(found, key=lambda path: (found[path] != wanted, -found[path]))


def _files(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("libnvrtc.so.*"))]


@functools.cache
def _library(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    library.nvrtcCreateProgram.argtypes = [c_void_p, c_char_p, c_char_p, c_int, c_void_p, c_void_p]
    library.nvrtcCompileProgram.argtypes = [c_void_p, c_int, c_void_p]
    library.nvrtcDestroyProgram.argtypes = [c_void_p]
    for name in ("nvrtcGetProgramLog", "nvrtcGetCUBIN"):
        getattr(library, f"{name}Size").argtypes = [c_void_p, c_void_p]
        getattr(library, name).argtypes = [c_void_p, c_void_p]
    library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = [c_int], c_char_p
    return library


def _read(library: Any, program: c_void_p, name: str) -> bytes:
    size = c_size_t()
    getattr(library, f"{name}Size")(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    getattr(library, name)(program, made)
    return made.raw


def _message(library: Any, status: int) -> str:
    return str(library.nvrtcGetErrorString(status).decode())
