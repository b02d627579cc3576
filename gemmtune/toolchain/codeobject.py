"""Code objects for AMD GPUs out of HIP device code: content-addressed files in the cache folder, compiled once by a clang.

ROCm's own clang or any other that knows AMD GPUs, such as a distribution's ``clang-19``; of ROCm only headers are needed, which
Triton's package brings too. The assembly text is kept beside the code object: what was compiled can be looked at without tools.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cache import cache_dir
from ..errors import CompileError, UnavailableError
from .made_once import compile_text, made_once

FLAGS = ("-x", "hip", "--offload-device-only", "-nogpulib", "-O3", "-std=c++17", "-D__HIP_PLATFORM_AMD__", "-DNDEBUG", "-w")
LEAST_CLANG = 19
"""The oldest release that has been tried."""
NEWEST_CLANG = 25
ROCM = Path("/opt/rocm")
REMEDY = "install clang (apt-get install clang-19 lld-19) or ROCm, or compile on a machine that has one of them (gemmtune build)"
HEADER = Path("hip/hip_runtime.h")
HEADERS_REMEDY = "install Triton, whose package has them, or ROCm, or libamdhip64-dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class HipCompiler:
    """A clang that compiles for AMD GPUs; ``headers`` is the folder with HIP's."""

    path: str
    release: int
    headers: Path

    def __str__(self) -> str:
        return f"clang {self.release}"


def find_hip_compiler() -> HipCompiler:
    """ROCm's clang, or else the newest that is on PATH or in Debian's folders.

    Raises:
        UnavailableError: there is none, or only older ones; or there are no headers of HIP.
    """
    reasons = []
    for path in _candidates():
        if not os.access(path, os.X_OK):
            continue
        try:
            release = _release(str(path), path.stat().st_mtime_ns)
        except UnavailableError as error:
            reasons.append(str(error))
            continue
        if release >= LEAST_CLANG:
            return HipCompiler(path=str(path), release=release, headers=_headers())
        reasons.append(f"{path} is clang {release}, expected {LEAST_CLANG} or newer")
    raise UnavailableError(f"no compiler for HIP ({'; '.join(reasons) or 'there is no clang'}): {REMEDY}")


def _candidates() -> list[Path]:
    hipcc = shutil.which("hipcc")
    rocm = [Path(hipcc).resolve().parent.parent] if hipcc else []
    own = [folder / "llvm/bin/clang++" for folder in (*rocm, ROCM)]
    for release in range(NEWEST_CLANG, LEAST_CLANG - 1, -1):
        found = shutil.which(f"clang++-{release}")
        own += [Path(found)] if found else []
        own.append(Path(f"/usr/lib/llvm-{release}/bin/clang++"))
    plain = shutil.which("clang++")
    return own + ([Path(plain)] if plain else [])


@functools.cache
def _release(path: str, modified_ns: int) -> int:  # noqa: ARG001 - a replaced compiler is asked again
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{path} does not run: {error}") from error
    found = re.search(r"clang version (\d+)", printed)
    if found is None:
        raise UnavailableError(f"{path} --version: got {printed!r}, expected a version of clang")
    return int(found[1])


def _headers() -> Path:
    spec = importlib.util.find_spec("triton")
    packaged = [Path(spec.origin).parent / "backends/amd/include"] if spec and spec.origin else []
    for folder in (ROCM / "include", *packaged, Path("/usr/include")):
        if (folder / HEADER).is_file():
            return folder
    raise UnavailableError(f"HIP's headers ({HEADER}) are not here: {HEADERS_REMEDY}")


def code_object_path(folder: str, digest: str) -> Path:
    """The file of a source's code object, made or not; not named by the compiler: what another machine made is used as it is."""
    return cache_dir(folder) / f"{digest}.hsaco"


def assembly_path(path: Path) -> Path:
    """The assembly text of the code object at ``path``."""
    return path.with_suffix(".s")


def make_code_object(
    path: Callable[[], Path], text: Callable[[], str], arch: str, includes: Callable[[], Sequence[Path]], name: str
) -> Path:
    """The code object at ``path()``, made out of ``text()`` if it is missing. Of several processes that need it, one compiles.

    Raises:
        CompileError: the compiler refused the source, or the cache folder cannot be written.
        UnavailableError: it is missing, and there is no compiler, or no headers.
    """

    def make(made: Path) -> None:
        compiler, assembly = find_hip_compiler(), assembly_path(made)
        folders = [f"-I{folder}" for folder in (*includes(), compiler.headers)]
        compile_text([compiler.path, *FLAGS, f"--offload-arch={arch}", *folders, "-S"], text(), ".hip", assembly, name)
        linked = [compiler.path, "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-x", "assembler", str(assembly), "-o", str(made)]
        finished = subprocess.run(linked, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise CompileError(name, finished.stderr or f"{compiler.path} ended with {finished.returncode}")
        os.replace(assembly, assembly_path(path()))

    return made_once(path, make, name)
