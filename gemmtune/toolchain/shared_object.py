"""Choices whose kernel nvcc makes: a shared object in the cache folder, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from ..choice import Kernel, Run
from ..device import DeviceInfo
from ..errors import UnavailableError
from .compiled import Artifact, CompiledChoice, binary_usage, find_cuobjdump
from .made_once import opened
from .nvcc import find_compiler

__all__ = ["Library", "SharedObjectChoice", "kernel_artifact", "load"]


class Library:
    """A loaded shared object: the functions that every one has, see launch.h.jinja. Raises OSError where the file is none."""

    def __init__(self, path: Path) -> None:
        self._functions = functions = ctypes.CDLL(str(path))
        self.capture, self.workspace_bytes = functions.gemmtune_capture, functions.gemmtune_workspace_bytes
        self.capture.argtypes, self.capture.restype = [ctypes.c_void_p], ctypes.c_ulonglong
        self.workspace_bytes.argtypes, self.workspace_bytes.restype = [ctypes.c_void_p], ctypes.c_longlong
        self.call = functions.gemmtune_call
        self.call.argtypes = [ctypes.c_void_p, ctypes.c_char_p]

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return int(self._functions.gemmtune_threads())

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        return int(self._functions.gemmtune_shared_bytes())


L = TypeVar("L", bound=Library)


def load(opens: Callable[[Path], L], path: Path) -> L:
    """What ``opens``, a Library's type, makes of the shared object at ``path``, once."""
    return cast("L", _loaded(opens, path))


@functools.lru_cache(maxsize=512)
def _loaded(opens: Callable[[Path], Library], path: Path) -> Library:
    return opens(path)


@dataclass(frozen=True, kw_only=True)
class SharedObjectChoice(CompiledChoice, Generic[L]):
    """A choice that is one kernel in one shared object."""

    @property
    @abstractmethod
    def library(self) -> type[L]:
        """What its shared object is opened with."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file of the shared object, made or not."""

    @abstractmethod
    def make(self) -> Path:
        """The shared object, made if it is missing. Raises CompileError; UnavailableError without nvcc."""

    @abstractmethod
    def launcher(self, library: L) -> Run:
        """The launch for the problem on the current device. Raises ErrorFromChoice: the kernel refuses it."""

    @abstractmethod
    def describe(self, path: Path, library: L) -> Artifact:
        """The kernel, and what was expected of it."""

    @property
    def compiled(self) -> bool:
        """The shared object is in the cache."""
        return self.path.exists()

    @property
    def obstacle(self) -> str | None:
        """Without nvcc, what was not compiled before cannot be run."""
        try:
            find_compiler()
        except UnavailableError as error:
            return None if self.compiled else str(error)
        return None

    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:  # noqa: ARG002 - its facts are checked at enumeration
        """The kernel of the shared object."""
        return (self.describe(*self.open()),)

    def compile(self) -> None:
        """Make the shared object, unless it is there. Raises CompileError; UnavailableError without nvcc."""
        self.make()

    def load(self) -> L:
        """The functions of the shared object.

        Raises:
            CompileError: it was not compiled yet, and nvcc refused it.
            UnavailableError: it was not compiled yet, and there is no nvcc; or it cannot be loaded here.
        """
        return self.open()[1]

    def bind(self, loaded: L) -> Kernel:
        """The launch for the problem on the current device. Raises ErrorFromChoice: the kernel or the device refuses it."""
        return Kernel(run=self.launcher(loaded))

    def open(self) -> tuple[Path, L]:
        """The shared object and its functions. Raises what ``load`` does."""
        try:
            return opened(self.make, lambda path: (path, load(self.library, path)))
        except OSError as error:
            raise UnavailableError(f"{self.name}: its shared object cannot be loaded here: {error}") from error


def kernel_artifact(path: Path, library: Library, *, kernel: str, expected: str, predicted_bytes: int | None = None) -> Artifact:
    """The only kernel of ``path``, which multiplies with the instruction ``expected``; without cuobjdump, what ``library`` says."""
    tool = find_cuobjdump()
    usage = binary_usage(path, tool) if tool else None
    return Artifact(
        kernel=kernel,
        threads=library.threads,
        shared_bytes=library.shared_bytes,
        registers=usage.registers if usage else None,
        stack_bytes=usage.stack_bytes if usage else None,
        code=usage.code if usage else "",
        spilled_share=usage.spilled_share if usage else 0.0,
        expected=expected if usage else None,
        predicted_bytes=predicted_bytes,
        slack_bytes=None if predicted_bytes is None else 0,
    )
