"""Choices whose compiled kernels can be inspected before they run, even for an architecture that this machine lacks."""

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
from typing import Any, TypeVar

from ..cache import cached, present, why_nothing_new
from ..choice import Choice
from ..device import DeviceInfo
from ..errors import UnavailableError
from .made_once import DamagedError, opened

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One compiled kernel: facts from its compiler and its binary, and the expectations about them.

    ``threads`` and ``shared_bytes`` count for a block, ``registers`` and ``stack_bytes`` for a thread. The latter two are None
    without a tool to read them. ``code`` is the assembly text.
    """

    kernel: str
    threads: int
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    code: str = field(repr=False)
    spilled_share: float = 0.0
    """The share of instructions that load or store spilled registers, in the loop that multiplies."""
    expected: str | None = None
    """The multiply instruction, with ``*`` for variable parts. None for a kernel that multiplies nothing."""
    predicted_bytes: int | None = None
    """The upper bound of shared memory that the legality check used."""
    slack_bytes: int | None = None
    """The part of that bound that not every kernel needs. None if the bound is not meant to be close."""


@dataclass(frozen=True, kw_only=True)
class CompiledChoice(Choice):
    """A choice compiled for one architecture, on any machine."""

    @property
    @abstractmethod
    def arch(self) -> str:
        """The target architecture, such as ``sm80``. Raise UnavailableError if it is not a GPU."""

    @abstractmethod
    def artifacts(self, device: DeviceInfo) -> tuple[Artifact, ...]:
        """Return the kernels, compiled if necessary and loaded on no device. Raises CompileError if the compiler rejects one."""

    @abstractmethod
    def forward(self) -> Choice:
        """Return the same kernels for a GPU newer than ``arch``. ``build`` then loads their PTX, which the driver translates."""


@dataclass(frozen=True, kw_only=True)
class FileChoice(CompiledChoice):
    """A choice whose kernel is one file in the cache folder, made by a compiler for CUDA or HIP."""

    @property
    @abstractmethod
    def source(self) -> Any:
        """The source to compile."""

    @property
    def content_hash(self) -> str:
        """A hash over the source and the name, which contains the launch arguments."""
        return hashlib.blake2b(f"{self.source.digest} {self.name}".encode(), digest_size=16).hexdigest()

    @property
    def compile_key(self) -> str:
        return f"{self.backend}-{self.source.digest}"

    @property
    @abstractmethod
    def file(self) -> tuple[str, ...]:
        """The folders below the cache folder, and the name of the file."""

    @property
    def path(self) -> Path:
        """The path of the file, which may not exist yet."""
        return cached(*self.file)

    @abstractmethod
    def make(self) -> Path:
        """Return the file, compiled if it is missing. Raise CompileError, or UnavailableError without a compiler."""

    @abstractmethod
    def compiler(self) -> object:
        """Return the compiler. Raise UnavailableError if there is none on this machine."""

    @property
    def compiled(self) -> bool:
        return present(self.path)

    @property
    def obstacle(self) -> str | None:
        if self.compiled:
            return None
        try:
            self.compiler()
        except UnavailableError as error:
            return str(error)
        return why_nothing_new(*self.file[:-1])

    def compile(self) -> None:
        self.make()

    def opened(self, load: Callable[[Path], T]) -> T:
        """Return ``load(path)`` of the file, compiled first if it is missing or damaged.

        Raises CompileError if the compiler rejects the source, UnavailableError without a compiler or if the file cannot be loaded
        here.
        """
        try:
            return opened(self.make, load)
        except (OSError, DamagedError) as error:
            raise UnavailableError(f"{self.name}: the compiled file cannot be loaded here: {error}") from error

    def artifact(
        self, path: Path, *, kernel: str, threads: int, shared_bytes: int, expected: str, predicted_bytes: int | None = None
    ) -> Artifact:
        """Return facts about the file's only kernel, which multiplies by ``expected``; without cuobjdump only its arguments."""
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
    """Registers and local memory of a thread, ``Artifact.spilled_share``, and the assembly text if requested."""

    registers: int
    stack_bytes: int
    spilled_share: float
    code: str = field(default="", repr=False)
    shared_bytes: int = 0
    """LDS of a block, read from the assembly text for an AMD GPU."""


def find_cuobjdump() -> Path | None:
    """Return cuobjdump on PATH, or else the one in Triton's package."""
    found = shutil.which("cuobjdump")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return tool if tool and tool.exists() else None


def cubin_usage(cubin: bytes, cuobjdump: Path) -> Usage:
    """Return the resource usage of a cubin's only kernel. Raises RuntimeError if cuobjdump fails or its format is unknown."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _usage(Path(file.name), cuobjdump, code=False)


def _usage(path: Path, cuobjdump: Path, *, code: bool) -> Usage:
    """Return the largest resource usage of the kernels in a cubin or in a shared object of nvcc. ``code`` adds the SASS."""
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
    """Return the resource usage of the only kernel in an amdgcn text, read from the metadata at its end."""
    numbers = {name: int(number) for name, number in re.findall(r"^\s*-? ?\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    return Usage(
        registers=numbers["vgpr_count"],
        stack_bytes=numbers["private_segment_fixed_size"],
        shared_bytes=numbers["group_segment_fixed_size"],
        spilled_share=spilled_share(text, AMDGCN),
    )


def _printed(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Regular expressions for lines of assembly: an ``instruction``, a ``place``, and the ``target`` place of a branch."""

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
"""The format of ``cuobjdump -sass``."""

AMDGCN = Assembly(
    place=re.compile(r"^(\.\w+):"),
    instruction=re.compile(r"^\s+[a-z]\w+"),
    target=re.compile(r"^\s+s_c?branch\w*\s+(\.\w+)"),
    multiplies=re.compile(r"^\s+v_(?:mfma|fma|fmac|pk_fma)_"),
    spills=re.compile(r"^\s+(?:scratch_(?:load|store)_|buffer_(?:load|store)_.*Folded (?:Reload|Spill))"),
)
"""LLVM's assembly text for AMD GPUs. gfx90a has no scratch instructions; comments mark its buffer instructions for spills."""


def spilled_share(text: str, assembly: Assembly) -> float:
    """Return the share of instructions that spill in the multiplying loop, the largest of several, or in the whole kernel."""
    lines = text.splitlines()
    loops = [lines[first : last + 1] for first, last in _loops(lines, assembly)]
    multiplying = [loop for loop in loops if any(assembly.multiplies.search(line) for line in loop)]
    instructions = [[line for line in loop if assembly.instruction.match(line)] for loop in multiplying or [lines]]
    return max(sum(bool(assembly.spills.search(line)) for line in loop) / max(len(loop), 1) for loop in instructions)


def _loops(lines: list[str], assembly: Assembly) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each loop: the lines that a backward branch spans."""
    places: dict[str, int] = {}
    for i, line in enumerate(lines):
        if place := assembly.place.match(line):
            places[place[1].lstrip("0")] = i
        target = assembly.target.search(line)
        if target and target[1].lstrip("0") in places:
            yield places[target[1].lstrip("0")], i
