"""Cubins from device code: files in the cache, compiled once, by NVRTC (in torch's CUDA wheels or a package) or else nvcc."""

import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CompileError, UnavailableError
from .made_once import compile_text, made_once
from .nvcc import LEAST_CUDA, find_compiler, toolkit_folders

FLAGS = ("-std=c++17", "-DNDEBUG")
REMEDY = (
    "install NVRTC (pip install nvidia-cuda-nvrtc) or the CUDA toolkit, or compile on a machine that has one of them "
    "(gemmtune build)"
)
NAME = re.compile(r"libnvrtc\.so\.(\d+)[\d.]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinCompiler:
    """A compiler of cubins. ``compile`` takes a text, the architecture, the file to write and a name for errors."""

    name: str
    compile: Callable[[str, str, Path, str], None]


def find_cubin_compiler() -> CubinCompiler:
    """Return NVRTC, which takes a fifth of nvcc's time, or else nvcc. Raise UnavailableError if there is neither."""
    reasons = []
    for find in (_nvrtc, _nvcc):
        try:
            return find()
        except UnavailableError as error:
            reasons.append(str(error))
    raise UnavailableError(f"no compiler for CUDA C++ ({'; '.join(reasons)}): {REMEDY}")


def _nvrtc() -> CubinCompiler:
    found = find_nvrtc()
    return CubinCompiler(name=str(found), compile=functools.partial(_compile_with_nvrtc, found))


def _compile_with_nvrtc(found: "Nvrtc", text: str, arch: str, made: Path, name: str) -> None:
    made.write_bytes(found.cubin(text, [*FLAGS, f"--gpu-architecture={arch}"], name))


def _nvcc() -> CubinCompiler:
    found = find_compiler()
    return CubinCompiler(name=f"nvcc {found.cuda}", compile=functools.partial(_compile_with_nvcc, found.path))


def _compile_with_nvcc(nvcc: str, text: str, arch: str, made: Path, name: str) -> None:
    compile_text([nvcc, *FLAGS, "-cubin", "-w", f"-arch={arch}"], text, ".cu", made, name)


def make_cubin(file: Sequence[str], text: Callable[[], str], arch: str, name: str) -> Path:
    """Return the cubin ``file`` of the cache. If it is missing, one of the processes that need it compiles ``text()``.

    The name of the file omits the compiler: any machine's file is valid. Raises CompileError if the compiler rejects the source or
    the cache folder is not writable, UnavailableError without a compiler.
    """
    return made_once(file, lambda made: find_cubin_compiler().compile(text(), arch, made, name), name)


def compile_cubin(compiler: CubinCompiler, file: Sequence[str], text: str, arch: str, name: str) -> None:
    """Make the cubin ``file`` of the cache by a compiler that another process has found. Needs no torch. Raises CompileError."""
    made_once(file, lambda made: compiler.compile(text, arch, made, name), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvrtc:
    """The NVRTC library at ``path``."""

    path: Path

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version of the library, such as (13, 0). Raise OSError if the library cannot be loaded."""
        major, minor = c_int(), c_int()
        _library(self.path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    def cubin(self, text: str, options: Sequence[str], name: str) -> bytes:
        """Compile a source without includes to a cubin. Raise CompileError for ``name`` with the end of the compiler's output."""
        library, program = _library(self.path), c_void_p()
        made = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        if made:
            raise CompileError(name, f"NVRTC: {_message(library, made)}")
        try:
            encoded = (c_char_p * len(options))(*(option.encode() for option in options))
            status = library.nvrtcCompileProgram(program, len(options), encoded)
            if status:
                log = _read(library, program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
                raise CompileError(name, log or f"NVRTC: {_message(library, status)}")
            return _read(library, program, "nvrtcGetCUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def find_nvrtc() -> Nvrtc:
    """Return this machine's NVRTC, preferably of torch's CUDA version, whose cubins load. Raises UnavailableError for none.

    A process keeps what it found: each choice that is not compiled yet asks for it.
    """
    reasons = []
    for path in libraries():
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
    """Return every libnvrtc near torch's packages or in a CUDA toolkit, the likeliest first."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    folders = [lib for package in packages for lib in sorted(package.glob("*/lib"))]
    folders += [folder / lib for folder in toolkit_folders() for lib in ("lib64", "targets/x86_64-linux/lib", "lib")]
    found = {
        path.resolve(): int(name[1])
        for folder in folders
        for path in sorted(folder.glob("libnvrtc.so.*"))
        if (name := NAME.search(path.name))
    }
    import torch  # noqa: PLC0415 - processes that only compile start without it

    wanted = int((torch.version.cuda or "0").split(".")[0])
    return sorted(found, key=lambda path: (found[path] != wanted, -found[path]))


@functools.cache
def _library(path: Path) -> Any:
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC finds it by name alone, where no search path has the folder
        ctypes.CDLL(str(builtins))
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
