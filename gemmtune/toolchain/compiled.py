"""Choices whose kernels can be looked at before they run: made by a compiler of ours, for an architecture that need not be here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from ..choice import Choice
from ..device import DeviceInfo
from .loops import AMDGCN, SASS, spilled_share

__all__ = ["Artifact", "CompiledChoice", "Usage", "amdgcn_usage", "binary_usage", "cubin_usage", "find_cuobjdump"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One compiled kernel: what its compiler and its binary say of it, and what was expected.

    ``threads`` and ``shared_bytes`` of a block; ``registers`` and ``stack_bytes`` of a thread, None where there is no tool to read
    them with. ``code`` is its assembly text.
    """

    kernel: str
    threads: int
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    code: str = field(repr=False)
    spilled_share: float = 0.0
    """Of the instructions of the loop that multiplies, the share that loads or stores spilled registers."""
    expected: str | None = None
    """The instruction that multiplies, with ``*`` for what may vary; None for a kernel that multiplies nothing."""
    predicted_bytes: int | None = None
    """The upper bound of the shared memory that legality went by."""
    slack_bytes: int | None = None
    """What is in that bound for a need that not every kernel has; None where the bound does not claim to be close."""


@dataclass(frozen=True, kw_only=True)
class CompiledChoice(Choice):
    """A choice that is compiled for one architecture, on any machine."""

    @property
    @abstractmethod
    def arch(self) -> str:
        """What it is compiled for, such as ``sm80``. Raises UnavailableError if it is not compiled for a GPU."""

    @abstractmethod
    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """The kernels, compiled if they are not yet, and loaded on no device; ``device`` has the facts that legality went by.

        Raises:
            CompileError: the compiler refused one.
        """

    @abstractmethod
    def forward(self) -> Choice:
        """The same kernels for a GPU newer than ``arch``: ``build`` loads their PTX, which the driver translates for that GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Registers of a thread, its local memory, ``Artifact.spilled_share``; and the assembly text, where it was asked for."""

    registers: int
    stack_bytes: int
    spilled_share: float
    code: str = field(default="", repr=False)


def find_cuobjdump() -> Path | None:
    """cuobjdump on PATH, else that of Triton's package."""
    found = shutil.which("cuobjdump")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return tool if tool and tool.exists() else None


def cubin_usage(cubin: bytes, cuobjdump: Path) -> Usage:
    """What the only kernel of a cubin uses, without its code.

    Raises:
        RuntimeError: cuobjdump failed, or printed something else than expected.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _usage(Path(file.name), cuobjdump, code=False)


def binary_usage(path: Path, cuobjdump: Path) -> Usage:
    """The most that a kernel of a cubin, or of a shared object of nvcc, uses, with all code as SASS. Raises as ``cubin_usage``."""
    return _usage(path, cuobjdump, code=True)


def _usage(path: Path, cuobjdump: Path, *, code: bool) -> Usage:
    text = _printed(cuobjdump, "-res-usage", path)
    found = [(int(registers), int(stack)) for registers, stack in re.findall(r"REG:(\d+) STACK:(\d+)", text)]
    if not found:
        raise RuntimeError(f"{cuobjdump} -res-usage: expected REG:… STACK:…, got\n{text}")
    registers, stack_bytes = (max(numbers) for numbers in zip(*found, strict=True))
    sass = _printed(cuobjdump, "-sass", path) if stack_bytes or code else ""
    return Usage(
        registers=registers,
        stack_bytes=stack_bytes,
        spilled_share=spilled_share(sass, SASS) if stack_bytes else 0.0,
        code=sass if code else "",
    )


def amdgcn_usage(text: str) -> Usage:
    """What the only kernel of an amdgcn text uses, from the metadata at its end."""
    numbers = {name: int(number) for name, number in re.findall(r"^\s*-? ?\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    return Usage(
        registers=numbers["vgpr_count"],
        stack_bytes=numbers["private_segment_fixed_size"],
        spilled_share=spilled_share(text, AMDGCN),
    )


def _printed(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
