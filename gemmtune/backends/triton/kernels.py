"""The way from source to a kernel: Triton's compiler and its cache, with no GPU; and the module that holds the source."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...cache import cache_dir
from ...device import DeviceInfo
from ...errors import CompileError, UnavailableError
from .classes import Source

_cache_lock = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is compiled for: ``backend`` is ``cuda`` or ``hip``, ``arch`` the capability times ten or the gfx name."""

    backend: str
    arch: int | str
    warp_size: int

    @property
    def name(self) -> str:
        """``sm80``, ``gfx942``: as ``DeviceInfo.arch`` has it."""
        return f"sm{self.arch}" if self.backend == "cuda" else str(self.arch)

    @classmethod
    def of(cls, device: DeviceInfo) -> Target | None:
        """What to compile for on ``device``; None for a CPU, where only the interpreter runs Triton."""
        if device.type == "cpu":
            return None
        arch = device.arch if device.type == "hip" else device.capability
        return cls(backend=device.type, arch=arch, warp_size=device.warp_size)


def toolchain() -> Any:
    """The module ``triton``, imported when a kernel is compiled, loaded or looked for: enumeration must do without it."""
    return importlib.import_module("triton")


def _folder() -> Path:
    return cache_dir("triton", f"triton-{toolchain().__version__}")


@functools.lru_cache(maxsize=1024)
def _load_module(text: str, folder: Path, interpret: bool) -> ModuleType:  # noqa: ARG001 - decorators of the module obey it
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = folder / f"{digest}.py"
    if not path.exists():
        _write_atomically(path, text)
    spec = importlib.util.spec_from_file_location(f"gemmtune_triton_{digest[:16]}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the kernel source {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Triton's artifacts go below our cache folder, for the duration of one compilation or load."""
    cache = toolchain().knobs.cache
    with _cache_lock, cache.scope():
        cache.dir = str(cache_dir("triton", "artifacts"))
        yield


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One kernel as the compiler is given it, for ``target`` or, where that is None, for the interpreter. Errors have ``name``."""

    name: str
    source: Source
    warps: int
    target: Target | None
    stages: int = 1
    options: tuple[tuple[str, int], ...] = ()
    """What the compiler of the target is told beside stages and warps."""

    @functools.cached_property
    def key(self) -> str:
        """A hash over all that the compiler is given, except the target."""
        signature = ";".join(f"{a.name}:{a.type}:{a.divisor}" for a in self.source.arguments)
        told = "".join(f",{name}={value}" for name, value in self.options)
        return hashlib.sha256(f"{self.source.text}\n{signature}\n{self.stages},{self.warps}{told}".encode()).hexdigest()

    @property
    def compiled(self) -> bool:
        """Was this kernel compiled here before, by the installed version of Triton? The interpreter needs no such thing."""
        return self.target is None or self._marker(self.target).exists()

    def _marker(self, target: Target) -> Path:
        return _folder() / f"{self.key}.{target.backend}{target.arch}.ok"

    def function(self) -> Any:
        """The kernel function: its module is written to a content-addressed file, which Triton reads back."""
        return getattr(_load_module(self.source.text, _folder(), bool(toolchain().knobs.runtime.interpret)), self.source.function)

    def compile(self) -> Any:
        """Triton's CompiledKernel, from its cache below our cache folder if it is there. Touches no GPU.

        Raises:
            CompileError: Triton or ptxas refused the source.
            UnavailableError: the interpreter runs the kernel, and compiles nothing.
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
                # MLIR, LLVM and ptxas report by many types, and all mean the same here.
                raise CompileError(self.name, f"{type(error).__name__}: {error}") from error
        if not self._marker(self.target).exists():
            _write_atomically(self._marker(self.target), compiled.hash)
        return compiled

    def load(self, *, from_ptx: bool) -> Any:
        """The kernel on the current device, compiled if it is not yet; or the function that the interpreter runs.

        Raises:
            CompileError: it was not compiled yet, and the compiler refused it.
            UnavailableError: ``from_ptx``, and the PTX is for its architecture alone.
        """
        if self.target is None:
            return self.function()
        key = (self.key, self.target, from_ptx, torch.cuda.current_device())
        compiled = _loaded.get(key)
        if compiled is None:
            compiled = self.compile()
            if from_ptx:
                use_ptx(compiled)
            initialise(compiled)
            _loaded[key] = compiled
        return compiled


_loaded: dict[tuple[str, Target, bool, int], Any] = {}
"""Kernels of this process by key, target, whether they come from PTX, and device index: problems of one class share them."""


def initialise(compiled: Any) -> None:
    """Load the binary on the current device, with Triton's launcher compiled into our cache folder where its version has one."""
    with _own_cache():
        compiled._init_handles()


def assembly(compiled: Any) -> str:
    """The PTX of a compiled kernel, or its amdgcn for HIP.

    Raises:
        UnavailableError: Triton did not keep it.
    """
    kind = "ptx" if compiled.metadata.target.backend == "cuda" else "amdgcn"
    if kind not in compiled.asm:
        raise UnavailableError(
            f"{compiled.metadata.name}: Triton kept only {', '.join(compiled.asm)}, expected {kind} too; unset "
            "TRITON_STORE_BINARY_ONLY and remove the cached artifacts"
        )
    return str(compiled.asm[kind])


def use_ptx(compiled: Any) -> None:
    """Have ``initialise`` load the PTX of a kernel that is not loaded yet: the driver translates it for the GPU at hand.

    Registers, and so the possible spills, are then those of the translation; warps and shared memory stay those of the compilation.

    Raises:
        UnavailableError: only the architecture itself runs this PTX (``sm_90a``), or there is none.
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
            f"{toolchain().__version__} does otherwise, and its PTX cannot be loaded in its place"
        )
    compiled.kernel = text.encode() + b"\0"
