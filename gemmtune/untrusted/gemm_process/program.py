"""Answers to the questions about one GEMM.

Every message is a JSON object behind its length. An answer repeats the ``nonce`` of its question. Nothing that this process
says is believed: the caller reads results out of its own memory, and its own clock.
"""

from __future__ import annotations

import builtins
import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler, profiler_util
from torch.autograd.profiler import profile

from . import journal, loading, seal, state
from .loading import IMPORT_ONLY, found_at, plain_traits
from .state import State

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

MOST_CHARS = 2000
"""Longest text of an error."""
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
        self._set_profiling: Any = profiler._set_is_profiler_enabled
        self._memory = _shared(opening, memory)
        self._flush = _flush(self._device)
        _load_products(self._device)
        self._previous: Any = None
        self._functions: dict[str, Callable[..., Any]] = {}
        target = opening["target"]
        self._note, self.events = journal.journal([os.path.abspath(root) for root in target["roots"]])
        self._state = State(self._device)
        self.environment = dict(os.environ)
        self.check = _checker(seal.sealed(_spaces()), self._note)

    def opened(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Import the GEMM and return its functions with their declarations."""
        try:
            found: Any = found_at(question["target"])
        except SystemExit as error:
            raise ImportError(f"its import raised SystemExit({error})") from error
        names, functions = [], dict[str, Any]()
        for op in question["ops"]:
            function = getattr(found, op, None)
            if callable(function):
                functions[op] = function
                names.append(op)
        if not names and question["target"]["name"] != IMPORT_ONLY:
            if not callable(found):
                raise TypeError(f"got {type(found).__name__}, expected a function f(a, b), or functions named as torch's")
            functions[""] = found
        self._functions = {name: _guarded(function, self.check) for name, function in functions.items()}
        declared = {name: plain for name, function in functions.items() if (plain := plain_traits(function)) is not None}
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
            self._set_profiling(False)  # a flag that Python code reads; torch's own does not see a profiler of all threads
            answer = self.call(question)
        return answer | {"ran": dict(Counter(event.name for event in seen.function_events or ()))}

    def state(self, _question: Mapping[str, Any]) -> dict[str, Any]:
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
            self._note("lazy", f"{type(result).__name__}, which is no plain tensor")
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
    """Load torch's products on a GPU: a capture of a graph cannot, and the memory that they take is not the GEMM's."""
    for x in [] if device == "cpu" else [torch.ones(16, 16, dtype=x, device=device) for x in (torch.float32, torch.bfloat16)]:
        torch.mm(x, x)


def _flush(device: str) -> Callable[[], object]:
    """Return a function that fills the L2 of a GPU with other numbers, by reading, as ``timing`` does."""
    if device == "cpu":
        return lambda: None
    l2_bytes = torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    return torch.zeros(FLUSH_CACHES * l2_bytes // 4, device=device).sum


def _messages(fd: int) -> Iterator[dict[str, Any]]:
    """Yield the questions until the caller closes the pipe."""
    receive, loads, unpack = os.read, json.loads, struct.unpack

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = receive(fd, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    while True:
        try:
            yield loads(read(*unpack("!i", read(4))))
        except EOFError:
            return


def _spaces() -> list[tuple[str, Mapping[str, Any], list[str]]]:
    """Return what answers rest on: this package, Python's builtins and JSON, and torch's profiler."""
    whole = (json, json.encoder, json.decoder, journal, loading, seal, state, json.JSONEncoder, json.JSONDecoder, Program, State)
    parsed = (profiler.profile, profiler_util.FunctionEvent, profiler_util.EventList)
    spaces: list[tuple[str, Mapping[str, Any], list[str]]] = [
        (owner.__name__, vars(owner), list(vars(owner))) for owner in (*whole, *parsed)
    ]
    spaces.append((__name__, globals(), list(globals())))
    for owner in (builtins, profiler):
        spaces.append((owner.__name__, vars(owner), [name for name, value in vars(owner).items() if callable(value)]))
    return spaces


def _checker(replaced: Callable[[], list[str]], note: Callable[[str, str], None]) -> Callable[[], None]:
    def check() -> None:
        for name in replaced():
            note("replaces", name)

    return check


def _guarded(function: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that is followed by a check, before anything else runs."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            check()

    return guarded


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MOST_CHARS]
    except Exception:  # noqa: BLE001 - an error of the GEMM that has no text
        return type(error).__name__[:MOST_CHARS]


def serve(fd: int, memory: int) -> None:
    """Answer the questions about one GEMM from the pipe ``fd`` until it is closed.

    All that this uses is in its own variables, which a GEMM reaches by the stack alone.
    """
    encoded, pack, write, described = seal.encoder(), struct.pack, os.write, _described
    check: Callable[[], None] | None = None
    events: Callable[[], list[tuple[str, str]]] = list
    handlers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}

    def send(answer: dict[str, Any]) -> None:
        try:
            data = encoded(answer)
        except (TypeError, ValueError, RecursionError) as error:
            data = encoded({"nonce": answer["nonce"], "ok": False, "error": described(error), "events": answer.get("events", [])})
        rest = memoryview(pack("!i", len(data)) + data)
        while rest:
            rest = rest[write(fd, rest) :]

    for question in _messages(fd):
        answer: dict[str, Any] = {"nonce": question["nonce"], "ok": True}
        try:
            if question["do"] == "open":
                program = Program(question, memory)
                check, events = program.check, program.events
                handlers = {"call": program.call, "profile": program.profile, "state": program.state}
                answer |= program.opened(question)
            else:
                assert check is not None
                check()
                answer |= handlers[question["do"]](question)
        except Exception as error:  # noqa: BLE001 - whatever the GEMM raises is its answer
            answer |= {"ok": False, "error": described(error)}
        if check is not None:
            check()
        answer["events"] = events()
        send(answer)
