"""Choices that misbehave on purpose, and functions for worker processes to run. Imported by tests and by their workers."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemmtune.choice import Choice, Claims, Kernel
from gemmtune.errors import CompileError
from gemmtune.problem import Problem

CLAIMS = Claims(accumulate=torch.float32)
PROBLEM = Problem.mm(64, 48, 32, dtype=torch.float32, device_type="cpu")
LIMITS_S = (1.5, 60.0)
"""Time limits for what hangs: the first is enough for the good ones beside it, unless the machine has much else to do."""


def segfault(*_: object) -> None:
    ctypes.string_at(0)


def is_socket(path: str) -> bool:
    return os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode)


def write_to_pipe(data: bytes, pause_s: float = 0.0) -> None:
    """Write bytes into the pipe of answers, one at a time with a pause, and answer never."""
    pipe = next(int(number) for number in os.listdir("/proc/self/fd") if is_socket(f"/proc/self/fd/{number}"))
    for place in range(len(data) if pause_s else 1):
        os.write(pipe, data[place : place + 1] if pause_s else data)
        time.sleep(pause_s)
    hang()


def garble(*_: object) -> None:
    write_to_pipe(b"no answer " * 10)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(*_: object) -> None:
    time.sleep(1000)


def hang_with_gil(*_: object) -> None:
    ctypes.PyDLL(None).sleep(1000)


def fail(*_: object) -> None:
    raise ValueError("this kernel does not like its operands")


FAILING: list[bool] = []


def fail_later(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], scalars: object) -> None:
    """Right until FAILING says otherwise."""
    (fail if FAILING else multiply)(out, tensors, scalars)


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate more than there is")


class OutOfResources(Exception):
    """Named like Triton's."""


def out_of_resources(*_: object) -> None:
    raise OutOfResources("shared memory, Required: 300000, Hardware limit: 232448")


def multiply(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    a, b, *_rest = tensors
    torch.mm(a, b, out=out)


def wrong(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    a, b, *_rest = tensors
    torch.mm(a, b, out=out)
    out[-1, -1] += 1


def slow(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    a, b, *_rest = tensors
    torch.mm(a, b, out=out)
    time.sleep(0.002)


def packed(out: torch.Tensor, tensors: tuple[torch.Tensor, ...], _: object) -> None:
    """b comes as its transpose."""
    a, b, *_rest = tensors
    torch.mm(a, b.t(), out=out)


RUNS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        segfault,
        hang,
        hang_with_gil,
        garble,
        fail,
        fail_later,
        out_of_memory,
        out_of_resources,
        multiply,
        wrong,
        slow,
        packed,
    )
}


@dataclass(frozen=True, kw_only=True)
class Fake(Choice):
    """Runs RUNS[run]. Compiling does what ``compiling`` says and, on success, writes the file ``artifact``."""

    run: str = "multiply"
    compiling: str = ""
    artifact: str = ""

    @property
    def content_hash(self) -> str:
        return f"fake-{self.name}"

    @property
    def compile_key(self) -> str | None:
        return self.artifact or self.compiling or None

    @property
    def compiled(self) -> bool:
        return self.compile_key is None or bool(self.artifact and Path(self.artifact).exists())

    def compile(self) -> None:
        match self.compiling:
            case "error":
                raise CompileError(self.name, "line 1\nerror: expected ';'")
            case "hang":
                subprocess.run(["sleep", "1000"], check=True)
            case "segfault":
                segfault()
            case "raise":
                raise KeyError("tile")
        if self.artifact:
            with open(self.artifact, "a") as file:
                file.write(f"{os.getpid()} {torch.cuda.is_available()} {os.environ.get('CUDA_VISIBLE_DEVICES')!r}\n")

    def bind(self, loaded: object) -> Kernel:
        if self.run == "build_fails":
            raise RuntimeError("cannot load the artifact")
        return Kernel(run=RUNS[self.run])

    @property
    def packed_format(self) -> str | None:
        return "transposed" if self.run == "packed" else None

    def pack(self, b: torch.Tensor) -> torch.Tensor:
        return b.t().contiguous() if self.run == "packed" else b


def fake(name: str, problem: Problem = PROBLEM, **fields: Any) -> Fake:
    return Fake(name=f"fake:{name}", backend="fake", problem=problem, claims=CLAIMS, **fields)


# Jobs for workers that are no choices.


def add(a: int, b: int) -> int:
    return a + b


def noisy() -> str:
    """Prints through Python, through a child and through the C library."""
    print("from Python " * 10_000)
    print("to stderr", file=sys.stderr)
    subprocess.run(["echo", "from a child"], check=True)
    os.write(1, b"raw bytes \x00\x80\xff")
    return "done"


def environment(name: str) -> str | None:
    return os.environ.get(name)


def start_grandchild() -> int:
    """A process that outlives the job, unless the worker's group is killed."""
    return subprocess.Popen(["sleep", "1000"]).pid


def grandchild_then_hang(path: str) -> None:
    Path(path).write_text(f"{os.getpid()} {start_grandchild()}")
    hang()


class Unreadable(Exception):
    """Can be pickled but not read back."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_unreadable() -> None:
    raise Unreadable(1, 2)


def return_unpicklable() -> object:
    return lambda: None


def raise_value_error() -> None:
    raise ValueError("got 3, expected 4")


def exit_status() -> None:
    print("last words", file=sys.stderr)
    os._exit(7)


# For tests that look at processes.


def is_running(pid: int) -> bool:
    """A zombie does not run."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(*pids: int, timeout_s: float = 10.0) -> list[int]:
    """Those that still run after the time."""
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in pids if is_running(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
