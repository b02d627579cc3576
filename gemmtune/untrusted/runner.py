"""Program of the processes in which untrusted GEMMs run. It imports torch, the GEMM and nothing of gemmtune.

The first process imports torch and forks another one for each GEMM. Every message to a fork is a JSON object behind its
length. An answer repeats the ``nonce`` of its question. Nothing that a fork says is believed: the caller reads results out of
its own memory, and its own clock.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import mmap
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

MOST_EVENTS = 100
"""Largest number of events in one answer."""
PARENT_CHECK_S = 1.0
IMPORT_ONLY = "*"
PR_SET_CHILD_SUBREAPER = 36
SECRETS = re.compile(r"/proc/(self|thread-self|\d+)/(mem|maps|smaps|environ|cmdline|fd)\b")
"""Files that show the memory and the arguments of processes."""
SPIN_CYCLES = 200_000
"""Cycles for which a GPU waits before a timed call, so that launches are queued when it begins."""
PERSISTING_L2 = 6
"""``CU_LIMIT_PERSISTING_L2_CACHE_SIZE`` of the CUDA driver."""
WATCHED: tuple[tuple[Any, str], ...] = (
    *((time, name) for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")),
    *((gc, name) for name in ("collect", "get_objects", "disable")),
    *((sys, name) for name in ("settrace", "setprofile", "_getframe", "exit")),
    *((os, name) for name in ("_exit", "fork", "read", "write", "open", "kill")),
    *((builtins, name) for name in ("open", "print", "isinstance", "abs", "max", "all")),
    *((json, name) for name in ("dumps", "loads")),
    *((struct, name) for name in ("pack", "unpack")),
    *((torch, name) for name in ("mm", "matmul", "bmm", "addmm", "baddbmm", "allclose", "isclose", "equal", "empty", "frombuffer")),
    *((torch, name) for name in ("zeros", "randn", "rand", "set_num_threads", "get_num_threads")),
    *((torch.Tensor, name) for name in ("mm", "matmul", "bmm", "__matmul__", "copy_", "clone", "double", "sum", "abs", "set_")),
    *((torch.Tensor, name) for name in ("data_ptr", "allclose", "equal", "__eq__", "__sub__")),
    (torch.nn.functional, "linear"),
    (torch.testing, "assert_close"),
    (torch.autograd.profiler, "profile"),
    *((torch.cuda, name) for name in ("synchronize", "Event", "Stream", "current_stream", "CUDAGraph")),
    *((torch.cuda.Event, name) for name in ("record", "elapsed_time", "synchronize", "wait", "query")),
)  # fmt: skip
"""Functions that a GEMM has no reason to replace."""
FORKS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "os.exec")
SNIFFS = (
    "gc.get_objects",
    "gc.get_referrers",
    "gc.get_referents",
    "sys._getframe",
    "sys._current_frames",
    "sys.settrace",
    "sys.setprofile",
)
CODE = (".py", ".pth", ".so", ".json", ".toml")
"""Ends of the names of files that change what packages do."""
SIGHTS = ("inspect.py", "traceback.py")
"""Modules of Python through which a stack is read."""


class Journal:
    """Record of what the GEMM does besides computing, from hooks that Python code cannot remove."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._events: list[tuple[str, str]] = []
        self._roots = tuple(roots)
        self._seen: set[tuple[str, str]] = set()
        self._installed = tuple(os.path.join(os.path.abspath(entry), "") for entry in sys.path if os.path.isdir(entry))
        self._looking = False
        sys.addaudithook(self._hook)

    def taken(self) -> list[tuple[str, str]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def note(self, what: str, detail: str) -> None:
        """Add an event once."""
        if (what, detail) not in self._seen and len(self._seen) < MOST_EVENTS:
            self._seen.add((what, detail))
            self._events.append((what, detail))

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._looking:  # looking at frames is audited too
            return
        self._looking = True
        try:
            self._look(event, args)
        finally:
            self._looking = False

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path, flags = os.fsdecode(args[0]), args[2] if isinstance(args[2], int) else 0
            if SECRETS.match(path) and self._is_own():
                self.note("looks", path)
            elif flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and path != os.devnull:
                self._wrote(os.path.abspath(path))
        elif event in SNIFFS and self._is_own():
            self.note("looks", event)
        elif event == "object.__setattr__" and args[1] in ("__code__", "__globals__", "__closure__"):
            self.note("replaces", f"{args[1]} of {getattr(args[0], '__qualname__', type(args[0]).__name__)}")
        elif event.startswith(FORKS):
            self.note("starts", event)
        elif event in ("socket.connect", "os.kill"):
            self.note("reaches", f"{event} {args[1:] if event == 'socket.connect' else args}")

    def _wrote(self, path: str) -> None:
        """Note a file that is written, unless it lies in the folder for temporary files of this process."""
        if path.endswith(CODE) and path.startswith(self._installed) and "__pycache__" not in path:
            self.note("reaches", f"{path}, a file of a package")
        elif not path.startswith(os.getcwd()):
            self.note("writes", path)

    def _is_own(self) -> bool:
        """Return True if the GEMM's own code makes the call that is audited, directly or by a module that reads stacks."""
        frame: Any = _FRAME(3)
        while frame is not None and frame.f_code.co_filename.endswith(SIGHTS):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(self._roots)


_FRAME = sys._getframe


def conditions(device: str) -> dict[str, Any]:
    """Return the global state that changes what other code computes, by name."""
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    state: dict[str, Any] = {
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.default_device": str(torch.get_default_device()),
        "torch.num_threads": torch.get_num_threads(),
        "torch.grad_enabled": torch.is_grad_enabled(),
        "torch.mkldnn": torch.backends.mkldnn.enabled,
        "flushed subnormals": not bool(tiny + tiny),
        "CPU affinity": sorted(os.sched_getaffinity(0)),
        "tracing": sys.gettrace() is not None or sys.getprofile() is not None,
    }
    matmul = torch.backends.cuda.matmul
    for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        state[f"torch.backends.cuda.matmul.{name}"] = str(getattr(matmul, name))
    if device != "cpu":
        state["CUDA persisting L2 bytes"] = _persisting_l2()
    return state


def _persisting_l2() -> int:
    value = ctypes.c_size_t()
    ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(value), PERSISTING_L2)
    return value.value


class Program:
    """One loaded GEMM, the memory of its operands, and the questions about it."""

    def __init__(self, opening: Mapping[str, Any], memory: int) -> None:
        self._device: str = opening["device"]
        self._originals = [(owner, name, getattr(owner, name)) for owner, name in WATCHED if hasattr(owner, name)]
        self._copy, self._set = torch.Tensor.copy_, torch.Tensor.set_
        self._type = torch.Tensor
        self._memory = _shared(opening, memory)
        self._previous: Any = None
        self._functions: dict[str, Callable[..., Any]] = {}
        target = opening["target"]
        self.journal = Journal([os.path.abspath(root) for root in target["roots"]])
        self.before = conditions(self._device)
        self.environment = dict(os.environ)

    def opened(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Import the GEMM and return its functions with their declarations."""
        try:
            found: Any = _found(question["target"])
        except SystemExit as error:
            raise ImportError(f"its import raised SystemExit({error})") from error
        names = []
        for op in question["ops"]:
            function = getattr(found, op, None)
            if callable(function):
                self._functions[op] = function
                names.append(op)
        if not names and question["target"]["name"] != IMPORT_ONLY:
            if not callable(found):
                raise TypeError(f"got {type(found).__name__}, expected a function f(a, b), or functions named as torch's")
            self._functions[""] = found
        declared = {name: plain for name, function in self._functions.items() if (plain := _plain(function)) is not None}
        return {
            "functions": names,
            "name": str(getattr(found, "__name__", "")),
            "traits": _plain(found),
            "declared": declared,
            "inputs": getattr(found, "gemm_inputs", None),
        }

    def call(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Call the GEMM once. Its result goes to the place that the question names."""
        args = [self._value(x) for x in question["args"]]
        kwargs = {name: self._value(x) for name, x in question["kwargs"].items()}
        function = self._functions[question["function"]]
        if self._device != "cpu":
            return self._on_gpu(function, args, kwargs, question)
        return self._delivered(function(*args, **kwargs), args, question)

    def profile(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Call the GEMM once, and count the operations of torch and the kernels that it runs."""
        with profile(use_kineto=True, use_device=None if self._device == "cpu" else "cuda") as seen:
            answer = self.call(question)
        return answer | {"ran": dict(Counter(event.name for event in seen.function_events or ()))}

    def state(self) -> dict[str, Any]:
        """Return what is no longer as it was before the GEMM was imported."""
        now = conditions(self._device)
        environment = sorted(
            name for name in {**self.environment, **os.environ} if self.environment.get(name) != os.environ.get(name)
        )
        replaced = [f"{owner.__name__}.{name}" for owner, name, value in self._originals if getattr(owner, name, None) is not value]
        changed = {name: [str(self.before[name]), str(now[name])] for name in now if now[name] != self.before[name]}
        return {"changed": changed, "environment": environment, "replaced": replaced, "threads": threading.active_count()}

    def _on_gpu(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], question: Mapping[str, Any]) -> Any:
        """Call the GEMM between two events of its stream, the delivery of its result included, then wait for the whole device."""
        begun, ended = (torch._C._CudaEventBase(enable_timing=True) for _ in range(2))
        stream = torch._C._cuda_getCurrentRawStream(0)
        current = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
        torch.cuda._sleep(SPIN_CYCLES)
        torch._C._CudaEventBase.record(begun, current)
        answer = self._delivered(function(*args, **kwargs), args, question)
        torch._C._CudaEventBase.record(ended, current)
        torch._C._cuda_synchronize()
        return answer | {"device_us": torch._C._CudaEventBase.elapsed_time(begun, ended) * 1e3}

    def _delivered(self, result: Any, args: Sequence[Any], question: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a result to its place, and describe it."""
        answer: dict[str, Any] = {"type": type(result).__name__}
        if not isinstance(result, self._type):
            return answer
        if type(result) is not self._type:
            self.journal.note("lazy", f"{type(result).__name__}, which is no plain tensor")
        kept, self._previous = self._previous, result
        where = result.data_ptr()
        answer |= {"dtype": str(result.dtype).removeprefix("torch."), "size": list(result.shape), "device": result.device.type}
        answer["alias"] = any(isinstance(x, self._type) and x.numel() and x.data_ptr() == where for x in args)
        answer["again"] = kept is not None and kept is not result and bool(result.numel()) and kept.data_ptr() == where
        answer["same"] = kept is result and "out" not in question["kwargs"]
        if "out" in question["kwargs"]:
            return answer | {"alias": False, "again": False}
        place, nbytes = question["result"], result.numel() * result.element_size()
        if nbytes <= question["room"] and result.layout == torch.strided:
            target = self._view(place, nbytes, str(result.dtype).removeprefix("torch."), result.shape, None, 0)
            self._copy(target, result)
        return answer

    def _value(self, word: Any) -> Any:
        if not isinstance(word, dict):
            return word
        if "dtype" in word:
            return getattr(torch, word["dtype"])
        if "bsr" in word:
            return torch.sparse_bsr_tensor(*map(self._value, word["bsr"]), size=word["shape"])
        return self._view(word["at"], word["bytes"], word["of"], word["size"], word["stride"], word["offset"])

    def _view(
        self, at: int, nbytes: int, dtype: str, size: Sequence[int], stride: Sequence[int] | None, offset: int
    ) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if isinstance(self._memory, torch.Tensor):
            whole = self._memory.view(kind)
            steps = torch.empty(size, device="meta").stride() if stride is None else stride
            return whole.as_strided(size, steps, at // kind.itemsize + offset)
        if not nbytes:
            return torch.empty(size, dtype=kind)
        storage = torch.frombuffer(self._memory, dtype=torch.uint8, offset=at, count=nbytes).untyped_storage()
        steps = torch.empty(size, device="meta").stride() if stride is None else stride
        return self._set(torch.empty(0, dtype=kind), storage, offset, size, steps)


def _shared(opening: Mapping[str, Any], memory: int) -> Any:
    """Return the caller's memory: a mapped file, or memory of the GPU."""
    if opening["device"] == "cpu":
        return mmap.mmap(memory, opening["bytes"])
    torch.cuda.set_device(0)
    torch.cuda.init()
    handle = [bytes.fromhex(x["hex"]) if isinstance(x, dict) else x for x in opening["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


def _plain(found: Any) -> Any:
    """Return the declarations of a GEMM as plain values."""
    declared = getattr(found, "gemm_traits", None)
    if declared is None:
        return None
    as_json = getattr(declared, "as_json", None)
    return as_json() if callable(as_json) else dict(declared)


def _found(target: Mapping[str, Any]) -> Any:
    """Load the GEMM of a target."""
    kind, path, name = target["kind"], target["path"], target["name"]
    if kind == "torch":
        return Torch
    if kind == "library":
        return _from_library(path, name, target["traits"])
    if kind == "file":
        stem = Path(path).stem
        spec = importlib.util.spec_from_file_location(stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path}: got no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    if name == IMPORT_ONLY:
        return None
    if not name:
        name = _only_name(module)
    found = functools.reduce(getattr, name.split("."), module) if name else module
    return _model(found, module) if isinstance(found, type) and issubclass(found, torch.nn.Module) else found


def _only_name(module: Any) -> str:
    """Return the name of a module's GEMM: ModelNew, or the only function that it defines; "" for a module of several."""
    if hasattr(module, "ModelNew"):
        return "ModelNew"
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    declared = [name for name in own if hasattr(vars(module)[name], "gemm_traits")]
    return declared[0] if len(declared) == 1 else own[0] if len(own) == 1 else ""


def _model(kind: Any, module: Any) -> Callable[..., Any]:
    """Return a model of KernelBench's form as a function, with the sizes and dtypes of its inputs."""
    arguments = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
    model = kind(*arguments)

    def forward(a: torch.Tensor, b: torch.Tensor) -> Any:
        with torch.no_grad():
            return model(a, b)

    inputs = module.get_inputs() if hasattr(module, "get_inputs") else []
    given = [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in inputs if isinstance(x, torch.Tensor)]
    forward.gemm_inputs = given  # type: ignore[attr-defined]
    declared = getattr(kind, "gemm_traits", None) or getattr(module, "gemm_traits", None)
    if declared is not None:
        forward.gemm_traits = declared  # type: ignore[attr-defined]
    forward.__name__ = "bmm" if given and len(given[0][0]) == 3 else "mm"
    return forward


def _from_library(path: str, name: str, traits: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function ``void name(a, b, out, m, n, k[, stream])`` of a shared object, for row-major matrices."""
    function = getattr(ctypes.CDLL(path), name)
    function.restype = None

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not (a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype):
            raise NotImplementedError("takes two row-major matrices of one dtype")
        out = a.new_empty((a.shape[0], b.shape[1]))
        sizes = [ctypes.c_int64(x) for x in (a.shape[0], b.shape[1], a.shape[1])]
        stream = [ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)] if a.is_cuda else []
        function(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)), *sizes, *stream)
        return out

    matmul.gemm_traits = dict(traits)  # type: ignore[attr-defined]
    return matmul


class Torch:
    """torch's own operations, and a call that does nothing."""

    mm, bmm, addmm, baddbmm = torch.mm, torch.bmm, torch.addmm, torch.baddbmm

    @staticmethod
    def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply 8-bit integers."""
        return torch._int_mm(a, b)

    @staticmethod
    def nothing(out: torch.Tensor) -> torch.Tensor:
        """Return the argument."""
        return out


def _messages(fd: int) -> Iterator[dict[str, Any]]:
    """Yield the questions until the caller closes the pipe."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = os.read(fd, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    while True:
        try:
            yield json.loads(read(*struct.unpack("!i", read(4))))
        except EOFError:
            return


def serve(fd: int, memory: int) -> None:
    """Answer the questions about one GEMM from the pipe ``fd`` until it is closed."""
    dumps, pack, write = json.dumps, struct.pack, os.write

    def send(answer: Mapping[str, Any]) -> None:
        data = dumps(answer).encode()
        rest = memoryview(pack("!i", len(data)) + data)
        while rest:
            rest = rest[write(fd, rest) :]

    program: Program | None = None
    for question in _messages(fd):
        answer: dict[str, Any] = {"nonce": question["nonce"], "ok": True}
        try:
            if question["do"] == "open":
                program = Program(question, memory)
                answer |= program.opened(question)
            else:
                assert program is not None
                answer |= program.state() if question["do"] == "state" else getattr(program, question["do"])(question)
        except Exception as error:  # noqa: BLE001 - whatever the GEMM raises is its answer
            answer |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        if program is not None:
            answer["events"] = program.journal.taken()
        send(answer)


def _begin(request: Mapping[str, Any], pipe: int, memory: int, output: int, control: socket.socket, parent: int) -> None:
    """Become the process of one GEMM, with nothing of the first process but its modules."""
    control.close()
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the GEMM starts stays among its descendants
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    serve(pipe, memory)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def _status(pid: int) -> int | None:
    """Return how a fork ended, as the system has it. None while it runs."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found else None


def main(control: socket.socket) -> None:
    """Fork a process for each request until the caller closes the socket, then end what is left of them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own, forks = os.getpid(), set[int]()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 2**16, 3)
        if not data:
            break
        request = json.loads(data)
        if request["do"] == "status":
            status = _status(request["pid"])
            forks -= {request["pid"]} if status is not None else set()
            control.send(json.dumps({"status": status}).encode())
            continue
        pid = os.fork()
        if not pid:
            try:
                _begin(request, *fds, control, own)
            finally:
                os._exit(0)
        forks.add(pid)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid}).encode())
    for pid in forks:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    server = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = [""]
    del sys.modules["__main__"].__file__
    server.send(b"ready")
    main(server)
