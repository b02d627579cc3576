"""Compilation of Triton source without a GPU, Triton's cache, and the module that holds the source. Compiling needs no torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import settings
from ..cache import cache_dir, cached, present, write_once
from ..errors import CompileError, UnavailableError
from .triton_artifacts import FOLDER, manager

if TYPE_CHECKING:
    from ..device import DeviceInfo

_cache_lock = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a kernel.

    ``source`` tells the launch where the value comes from: ``("pointer", "a")``, ``("size", "m")``, ``("stride", "b", 2)``,
    ``("scalar", "alpha")`` or ``("runtime", "group_m")``. ``("descriptor", "a")`` is a tensor descriptor, built from a pointer,
    sizes and strides at launch. ``divisor`` divides the value, or the address of a pointer.
    """

    name: str
    type: str
    source: tuple[Any, ...]
    divisor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rendered kernel: the text of its module, the function's name, and the arguments in order."""

    text: str
    function: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Compilation target: ``backend`` is ``cuda`` or ``hip``, ``arch`` the capability times ten or the gfx name."""

    backend: str
    arch: int | str
    warp_size: int

    @property
    def name(self) -> str:
        """Name such as ``sm80`` or ``gfx942``, equal to ``DeviceInfo.arch``."""
        return f"sm{self.arch}" if self.backend == "cuda" else str(self.arch)

    @classmethod
    def of(cls, device: DeviceInfo) -> Target | None:
        """Return the target for ``device``; None for a CPU, where Triton only runs in its interpreter."""
        if device.type == "cpu":
            return None
        arch = device.arch if device.type == "hip" else device.capability
        return cls(backend=device.type, arch=arch, warp_size=device.warp_size)


@functools.cache
def toolchain() -> Any:
    """Import and return ``triton``. Only compiling, loading and cache look-ups need it; enumeration works without it."""
    triton = importlib.import_module("triton")
    build = importlib.import_module("triton.runtime.build")
    if hasattr(build, "platform_key"):
        vars(build)["platform_key"] = _platform_key
    return triton


@functools.cache
def _platform_key() -> str:
    """Return what Triton's own function returns where the command ``file`` is installed.

    Triton names compiled modules by it, and without the command, as in a slim image, it would look for another name.
    """
    return ",".join([platform.machine(), platform.system(), platform.architecture()[0], "ELF"])


def _file(name: str) -> tuple[str, ...]:
    """Return the place of one of our own files in the cache."""
    return "triton", f"triton-{toolchain().__version__}", name


def _written(name: str, text: str) -> Path:
    """Return the path of one of our own files, written unless it has this text already."""
    file = _file(name)
    path = cached(*file)
    if not present(path) or path.read_text(encoding="utf-8") != text:
        path = cache_dir(*file[:-1]) / name
        write_once(path, text)
    return path


@functools.lru_cache(maxsize=1024)
def _load_module(text: str, path: Path, interpret: bool) -> ModuleType:  # noqa: ARG001 - decorators in the module read it
    """Return the module of a kernel's source, which Triton reads from the file at ``path``. No bytecode is kept."""
    module = ModuleType(f"gemmtune_triton_{path.stem[:16]}")
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Redirect Triton's artifacts below our cache folder during one compilation or load."""
    cache = toolchain().knobs.cache
    with _cache_lock, cache.scope():
        if cache.manager_class is None:
            cache.manager_class = manager
        else:
            cache.dir = str(cache_dir(*FOLDER))
        yield


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One kernel for the compiler, or for the interpreter if ``target`` is None. Errors contain ``name``."""

    name: str
    source: Source
    warps: int
    target: Target | None
    stages: int = 1
    options: tuple[tuple[str, int], ...] = ()
    """Options for the target's compiler, in addition to stages and warps."""

    @functools.cached_property
    def key(self) -> str:
        """Hash of all compiler inputs except the target."""
        signature = ";".join(f"{a.name}:{a.type}:{a.divisor}" for a in self.source.arguments)
        options = "".join(f",{name}={value}" for name, value in self.options)
        return hashlib.sha256(f"{self.source.text}\n{signature}\n{self.stages},{self.warps}{options}".encode()).hexdigest()

    @property
    def compiled(self) -> bool:
        """True if the installed version of Triton has compiled this kernel here before. The interpreter compiles nothing: True."""
        return self.target is None or present(cached(*_file(self._marker(self.target))))

    def _marker(self, target: Target) -> str:
        return f"{self.key}.{target.backend}{target.arch}.ok"

    def function(self) -> Any:
        """Return the kernel function. Its module is written to a content-addressed file, which Triton reads."""
        text = self.source.text
        path = _written(f"{hashlib.sha256(text.encode()).hexdigest()}.py", text)
        return getattr(_load_module(text, path, bool(toolchain().knobs.runtime.interpret)), self.source.function)

    def compile(self) -> Any:
        """Return Triton's CompiledKernel, compiled or from its cache below our cache folder. Touches no GPU.

        Raises CompileError if Triton or ptxas refuses the source, UnavailableError if the interpreter runs the kernel.
        """
        if self.target is None:
            raise UnavailableError(f"{self.name} runs in the interpreter: there is no compiled kernel")
        arguments, function = self.source.arguments, self.function()
        attributes = {(i,): [["tt.divisibility", a.divisor]] for i, a in enumerate(arguments) if a.divisor > 1}
        source_of = importlib.import_module("triton.compiler").ASTSource
        gpu = importlib.import_module("triton.backends.compiler").GPUTarget
        with _own_cache():
            try:
                compiled = toolchain().compile(
                    source_of(fn=function, signature={a.name: a.type for a in arguments}, constexprs={}, attrs=attributes),
                    target=gpu(self.target.backend, self.target.arch, self.target.warp_size),
                    options={"num_warps": self.warps, "num_stages": self.stages, **dict(self.options)},
                )
            except Exception as error:
                # MLIR, LLVM and ptxas raise many exception types, which all mean a failed compilation here.
                raise CompileError(self.name, f"{type(error).__name__}: {error}") from error
        _written(self._marker(self.target), compiled.hash)
        return compiled

    def load(self, *, from_ptx: bool) -> Any:
        """Return the kernel on the current device, compiled if necessary, or the function that the interpreter runs.

        Raises CompileError if the compiler refuses, UnavailableError for ``from_ptx`` and PTX of one architecture only.
        """
        if self.target is None:
            return self.function()
        import torch  # noqa: PLC0415 - processes that only compile start without it

        key = (self.key, self.target, from_ptx, torch.cuda.current_device())
        compiled = _loaded.get(key)
        if compiled is None:
            compiled = self.compile()
            if from_ptx:
                use_ptx(compiled)
            initialise(compiled)
            _loaded[key] = compiled
        return compiled


def compile_all(kernels: Sequence[Compilation]) -> None:
    """Compile the kernels of a choice, except those that the interpreter runs. Raises what ``Compilation.compile`` does."""
    for kernel in kernels:
        if kernel.target is not None:
            kernel.compile()


_loaded: dict[tuple[str, Target, bool, int], Any] = {}
"""Kernels loaded in this process by key, target, ``from_ptx`` and device index. Problems of one class share them."""


def initialise(compiled: Any) -> None:
    """Load the binary on the current device. Some Triton versions also compile their launcher into our cache folder."""
    with _own_cache():
        compiled._init_handles()


DRIVER = "import sys; from gemmtune.toolchain import triton_kernels; triton_kernels.load_driver_module(sys.argv[1])"


def load_driver_module(folder: str) -> None:
    """Load the module by which Triton calls the driver, compiled into a cache folder if it is not there."""
    with settings.patch(cache_dir=folder), _own_cache():
        _ = toolchain().runtime.driver.active


def keep_driver_module(folder: Path) -> None:
    """Put that module into a cache folder by a new process, because each loads it once. Raises CompileError if that fails."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder)], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        raise CompileError("Triton's driver module", done.stderr.strip().rpartition("\n")[2])


def assembly(compiled: Any) -> str:
    """Return the PTX of a compiled kernel, or its amdgcn for HIP. Raises UnavailableError if Triton did not keep it."""
    kind = "ptx" if compiled.metadata.target.backend == "cuda" else "amdgcn"
    if kind not in compiled.asm:
        raise UnavailableError(
            f"{compiled.metadata.name}: Triton kept only {', '.join(compiled.asm)}, expected {kind} too; unset "
            "TRITON_STORE_BINARY_ONLY and remove the cached artifacts"
        )
    return str(compiled.asm[kind])


def use_ptx(compiled: Any) -> None:
    """Make ``initialise`` load the PTX of a kernel that is not loaded yet. The driver translates it for the current GPU.

    Registers and spills then come from that translation, warps and shared memory from the compilation. Raises UnavailableError if
    there is no PTX, or only the architecture itself runs it (``sm_90a``).
    """
    text = assembly(compiled)
    target = re.search(r"^\.target\s+(sm_\d+\w*)", text, re.MULTILINE)
    if target is None or not target[1].removeprefix("sm_").isdigit():
        raise UnavailableError(
            f"{compiled.metadata.name}: got PTX for {target[1] if target else 'no target'}, expected one without a suffix: "
            "code that uses an architecture's own instructions runs on that architecture alone"
        )
    if compiled.module is not None or compiled.kernel is not compiled.asm["cubin"]:
        raise UnavailableError(
            f"{compiled.metadata.name}: expected a kernel that loads its cubin and is not loaded yet; triton "
            f"{toolchain().__version__} does not, so its PTX cannot be loaded instead"
        )
    compiled.kernel = text.encode() + b"\0"
