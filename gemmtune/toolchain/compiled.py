"""Choices whose kernels can be looked at before they run: made by a compiler of ours, for an architecture that need not be here."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from ..choice import Choice
from ..device import DeviceInfo
from ..errors import UnavailableError
from .made_once import opened

T = TypeVar("T")


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
    """The share of the instructions of the loop that multiplies which loads or stores spilled registers."""
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


class Digested(Protocol):
    """The source of a kernel."""

    @property
    def digest(self) -> str:
        """A hash over everything that makes the file."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileChoice(CompiledChoice):
    """A choice whose kernel is in one file of the cache folder, which a compiler for CUDA or HIP made."""

    @property
    @abstractmethod
    def source(self) -> Digested:
        """What has to be compiled."""

    @property
    def content_hash(self) -> str:
        """A hash over the source, and what its launches are told, which the name says."""
        return hashlib.blake2b(f"{self.source.digest} {self.name}".encode(), digest_size=16).hexdigest()

    @property
    def compile_key(self) -> str:
        """Equal for all sizes and launches of one source."""
        return f"{self.backend}-{self.source.digest}"

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file, made or not."""

    @abstractmethod
    def make(self) -> Path:
        """The file, made if it is missing. Raises CompileError; UnavailableError without a compiler."""

    @staticmethod
    @abstractmethod
    def compiler() -> object:
        """What makes it. Raises UnavailableError: there is none here."""

    @property
    def compiled(self) -> bool:
        """The file is in the cache."""
        return self.path.exists()

    @property
    def obstacle(self) -> str | None:
        """What was not compiled before cannot be run without a compiler."""
        try:
            self.compiler()
        except UnavailableError as error:
            return None if self.compiled else str(error)
        return None

    def compile(self) -> None:
        """Make the file, unless it is there. Raises what ``make`` does."""
        self.make()

    def opened(self, load: Callable[[Path], T]) -> T:
        """What ``load`` makes of the file, which is made if it is missing or damaged.

        Raises:
            CompileError: it was not compiled yet, and the compiler refused it.
            UnavailableError: it was not compiled yet, and there is no compiler; or it cannot be loaded here.
        """
        try:
            return opened(self.make, load)
        except OSError as error:
            raise UnavailableError(f"{self.name}: what was compiled cannot be loaded here: {error}") from error

    def artifact(
        self, path: Path, *, kernel: str, threads: int, shared_bytes: int, expected: str, predicted_bytes: int | None = None
    ) -> Artifact:
        """The only kernel of the file, which multiplies with the instruction ``expected``; without cuobjdump, what is told."""
        tool = find_cuobjdump()
        usage = _usage(path, tool, code=True) if tool else None
        return Artifact(
            kernel=kernel,
            threads=threads,
            shared_bytes=shared_bytes,
            registers=usage.registers if usage else None,
            stack_bytes=usage.stack_bytes if usage else None,
            code=usage.code if usage else "",
            spilled_share=usage.spilled_share if usage else 0.0,
            expected=expected if usage else None,
            predicted_bytes=predicted_bytes,
            slack_bytes=None if predicted_bytes is None else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Registers of a thread, its local memory, ``Artifact.spilled_share``; and the assembly text, where it was asked for."""

    registers: int
    stack_bytes: int
    spilled_share: float
    code: str = field(default="", repr=False)
    shared_bytes: int = 0
    """LDS of a block, which the text of an AMD GPU tells."""


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


def _usage(path: Path, cuobjdump: Path, *, code: bool) -> Usage:
    """The most that a kernel of a cubin, or of a shared object of nvcc, uses; its ``code`` is SASS."""
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
        shared_bytes=numbers["group_segment_fixed_size"],
        spilled_share=spilled_share(text, AMDGCN),
    )


def _printed(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """How to read one assembly language: regular expressions for a line.

    ``place`` finds what a branch may name (an address, a label) in its first group, ``instruction`` an instruction, ``target`` the
    place to which it branches.
    """

    place: re.Pattern[str]
    instruction: re.Pattern[str]
    target: re.Pattern[str]
    multiplies: re.Pattern[str]
    spills: re.Pattern[str]


SASS = Assembly(
    place=re.compile(r"^\s*/\*([0-9a-f]{4,})\*/"),
    instruction=re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+\S"),
    target=re.compile(r"\bBRA\b[^;]*?\b0x([0-9a-f]+)"),
    multiplies=re.compile(r"\b(?:[HDIQ]MMA|[HIQ]GMMA|UTC\w*MMA|[FDH]FMA2?)\b"),
    spills=re.compile(r"\b(?:LDL|STL)\b"),
)
"""What ``cuobjdump -sass`` prints."""

AMDGCN = Assembly(
    place=re.compile(r"^(\.\w+):"),
    instruction=re.compile(r"^\s+[a-z]\w+"),
    target=re.compile(r"^\s+s_c?branch\w*\s+(\.\w+)"),
    multiplies=re.compile(r"^\s+v_(?:mfma|fma|fmac|pk_fma)_"),
    spills=re.compile(r"^\s+(?:scratch_(?:load|store)_|buffer_(?:load|store)_.*Folded (?:Reload|Spill))"),
)
"""LLVM's assembly text for AMD GPUs; gfx90a has no scratch instructions, and says in a comment what a buffer's are for."""


def spilled_share(text: str, assembly: Assembly) -> float:
    """Share of the instructions of a loop that multiplies which load or store spilled registers; the largest if there are
    several loops, that of the whole kernel if nothing multiplies in a loop."""
    lines = text.splitlines()
    loops = [lines[first : last + 1] for first, last in _loops(lines, assembly)]
    multiplying = [loop for loop in loops if any(assembly.multiplies.search(line) for line in loop)]
    instructions = [[line for line in loop if assembly.instruction.match(line)] for loop in multiplying or [lines]]
    return max(sum(bool(assembly.spills.search(line)) for line in loop) / max(len(loop), 1) for loop in instructions)


def _loops(lines: list[str], assembly: Assembly) -> Iterator[tuple[int, int]]:
    """First and last line of each loop: what a branch jumps back over."""
    places: dict[str, int] = {}
    for i, line in enumerate(lines):
        if place := assembly.place.match(line):
            places[place[1].lstrip("0")] = i
        target = assembly.target.search(line)
        if target and target[1].lstrip("0") in places:
            yield places[target[1].lstrip("0")], i
