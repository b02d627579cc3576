"""Answers to the questions about one GEMM.

Every message is a JSON object behind its length. An answer repeats the ``nonce`` of its question. Nothing that this process
says is believed: the caller reads results out of its own memory, and its own clock.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile

from .journal import Journal
from .loading import IMPORT_ONLY, found_at, plain_traits
from .state import State

SPIN_CYCLES = 600_000
"""Cycles for which a GPU waits before a timed call, so that launches are queued when it begins: about 0.3 ms of the CPU's time."""

SUBJECT = "gemmtune.declaration.subject"
"""Module of GEMMs whose calls need gemmtune."""
FLUSH_CACHES = 2
"""Multiple of a GPU's L2 that is read before a timed call, so that no operand is in it."""


class Program:
    """One loaded GEMM, the memory of its operands, and the questions about it."""

    def __init__(self, opening: Mapping[str, Any], memory: int) -> None:
        self._device: str = opening["device"]
        self._copy, self._set = torch.Tensor.copy_, torch.Tensor.set_
        self._type = torch.Tensor
        cuda: Any = torch.cuda
        self._events: Any = getattr(torch._C, "_CudaEventBase", None)
        self._wait: Any = getattr(torch._C, "_cuda_synchronize", None)
        self._current_stream, self._on_stream, self._sleep = cuda.current_stream, cuda.stream, cuda._sleep
        self._memory = _shared(opening, memory)
        self._flush = _flush(self._device)
        _load_products(self._device)
        self._previous: Any = None
        self._functions: dict[str, Callable[..., Any]] = {}
        target = opening["target"]
        self.journal = Journal([os.path.abspath(root) for root in target["roots"]])
        self._state = State(self._device)
        self.environment = dict(os.environ)

    def opened(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Import the GEMM and return its functions with their declarations."""
        try:
            found: Any = found_at(question["target"])
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
        declared = {name: plain for name, function in self._functions.items() if (plain := plain_traits(function)) is not None}
        return {
            "functions": names,
            "name": str(getattr(found, "__name__", "")),
            "traits": plain_traits(found),
            "declared": declared,
            "inputs": getattr(found, "gemm_inputs", None),
            "ours": any(kind.__module__ == SUBJECT and kind.__name__ == "Subject" for kind in type(found).__mro__),
        }

    def call(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Call the GEMM once. Its result goes to the place that the question names."""
        args = [self._value(x) for x in question["args"]]
        kwargs = {name: self._value(x) for name, x in question["kwargs"].items()}
        function = self._functions[question["function"]]
        self._state.set_flags(question["flags"])
        if self._device != "cpu":
            return self._on_gpu(function, args, kwargs, question)
        return self._delivered(function(*args, **kwargs), args, question)

    def profile(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Call the GEMM once, and count the operations of torch, in any thread, and the kernels that it runs."""
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        with profile(use_kineto=True, use_device=None if self._device == "cpu" else "cuda", experimental_config=everywhere) as seen:
            answer = self.call(question)
        return answer | {"ran": dict(Counter(event.name for event in seen.function_events or ()))}

    def state(self) -> dict[str, Any]:
        """Return what is no longer as it was before the GEMM was imported."""
        environment = sorted(
            name for name in {**self.environment, **os.environ} if self.environment.get(name) != os.environ.get(name)
        )
        return {"changed": self._state.changed(), "environment": environment, "replaced": self._state.replaced()}

    def _on_gpu(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], question: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Call the GEMM between two events of its stream, the delivery of its result included, then wait for the whole device."""
        events = self._events
        begun, ended = events(enable_timing=True), events(enable_timing=True)
        stream = self._current_stream()
        self._flush()
        self._sleep(SPIN_CYCLES)
        events.record(begun, stream)
        result = function(*args, **kwargs)
        with self._on_stream(stream):
            answer = self._delivered(result, args, question)
        events.record(ended, stream)
        self._wait()
        return answer | {"device_us": events.elapsed_time(begun, ended) * 1e3}

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
            crow, col, values = map(self._value, word["bsr"])
            return torch.sparse_bsr_tensor(crow, col, values, size=word["shape"])
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
    cuda: Any = torch.cuda
    cuda.set_device(torch.device(opening["device"]))
    cuda.init()
    handle = [bytes.fromhex(x["hex"]) if isinstance(x, dict) else x for x in opening["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    return torch.empty(0, dtype=torch.uint8, device=opening["device"]).set_(storage)


def _load_products(device: str) -> None:
    """Load torch's products on a GPU, as in a program that has multiplied before.

    They cannot be loaded while a graph is captured, and the memory that they take is not the GEMM's.
    """
    if device != "cpu":
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(16, 16, dtype=dtype, device=device)
            torch.mm(x, x)
        torch.cuda.synchronize(device)


def _flush(device: str) -> Callable[[], object]:
    """Return a function that fills the L2 of a GPU with other numbers, by reading, as ``timing`` does."""
    if device == "cpu":
        return lambda: None
    l2_bytes = torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    return torch.zeros(FLUSH_CACHES * l2_bytes // 4, device=device).sum


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
