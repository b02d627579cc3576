"""Code objects for AMD GPUs from HIP device code: content-addressed files in the cache folder, compiled once by a clang.

The compiler is ROCm's clang or any other with support for AMD GPUs, such as a distribution's ``clang-19``. Of ROCm only the headers
are needed, which Triton's package also contains. The assembly text is kept next to the code object, readable without tools.
"""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompileError, UnavailableError
from .made_once import compile_text, made_once
from .tool import run_tool, version_text

FLAGS = ("-x", "hip", "--offload-device-only", "-nogpulib", "-O3", "-std=c++17", "-D__HIP_PLATFORM_AMD__", "-DNDEBUG", "-w")
LEAST_CLANG = 19
"""The oldest release known to work."""
NEWEST_CLANG = 25
ROCM = Path("/opt/rocm")
REMEDY = "install clang (apt-get install clang-19 lld-19) or ROCm, or compile on a machine that has one of them (gemmtune build)"
END_OF_ASSEMBLY = ".end_amdgpu_metadata"
HEADER = Path("hip/hip_runtime.h")
HEADERS_REMEDY = "install Triton, whose package has them, or ROCm, or libamdhip64-dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class HipCompiler:
    """A clang with support for AMD GPUs. ``headers`` is the folder with HIP's headers."""

    path: str
    release: int
    headers: Path

    def __str__(self) -> str:
        return f"clang {self.release}"


def find_hip_compiler() -> HipCompiler:
    """Return ROCm's clang, or else the newest one on PATH or in Debian's folders. Raises UnavailableError if nothing serves."""
    reasons = []
    for path in _candidates():
        if not os.access(path, os.X_OK):
            continue
        try:
            printed = version_text(str(path))
            version = re.search(r"clang version (\d+)", printed)
            if version is None:
                raise UnavailableError(f"{path} --version: got {printed!r}, expected a version of clang")
        except UnavailableError as error:
            reasons.append(str(error))
            continue
        release = int(version[1])
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


def _headers() -> Path:
    spec = importlib.util.find_spec("triton")
    packaged = [Path(spec.origin).parent / "backends/amd/include"] if spec and spec.origin else []
    for folder in (ROCM / "include", *packaged, Path("/usr/include")):
        if (folder / HEADER).is_file():
            return folder
    raise UnavailableError(f"HIP's headers: found no {HEADER}: {HEADERS_REMEDY}")


def assembly_path(path: Path) -> Path:
    """Return the path of the assembly text for the code object at ``path``."""
    return path.with_suffix(".s")


def assembly_text(path: Path) -> str:
    """Return the assembly text for the code object at ``path``. Raise OSError if it is missing or incomplete."""
    text = assembly_path(path).read_text(encoding="utf-8", errors="replace")
    if END_OF_ASSEMBLY not in text:
        raise OSError(f"{assembly_path(path)}: got a text without {END_OF_ASSEMBLY}, expected a whole one")
    return text


def make_code_object(
    file: Sequence[str], text: Callable[[], str], arch: str, includes: Callable[[], Sequence[Path]], name: str
) -> Path:
    """Return the code object ``file`` of the cache. If it is missing, one of the processes that need it compiles ``text()``.

    The name of the file omits the compiler: any machine's file is valid. Raises CompileError if the compiler rejects the source or
    the cache folder is not writable, UnavailableError without a compiler or headers.
    """

    def make(made: Path) -> None:
        compiler, assembly = find_hip_compiler(), assembly_path(made)
        folders = [f"-I{folder}" for folder in (*includes(), compiler.headers)]
        compile_text([compiler.path, *FLAGS, f"--offload-arch={arch}", *folders, "-S"], text(), ".hip", assembly, name)
        linked = [compiler.path, "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-x", "assembler", str(assembly), "-o", str(made)]
        finished = run_tool(linked)
        if finished.returncode != 0:
            raise CompileError(name, finished.stderr or f"{compiler.path} ended with {finished.returncode}")
        os.replace(assembly, made.parent.parent / assembly.name)  # next to the code object, which follows it

    return made_once(file, make, name)
