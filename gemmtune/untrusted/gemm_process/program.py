"""Answers to the questions about one GEMM.

Every message is a JSON object behind its length. An answer repeats the ``nonce`` of its question. Nothing that this process
says is believed: the caller reads results out of its own memory, and its own clock.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler, profiler_util
from torch.autograd.profiler import profile

from . import copies, journal, loading, manners, parts, places, reach, seal, state, system, tables, wires
from .loading import IMPORT_ONLY, found_at, graph_us, parameters_of, plain_traits
from .places import FILLED, addresses, change_torch, flusher, is_plain, load_products, reader_of_memory, shared
from .state import State

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

MOST_CHARS = 2000
"""Longest text of an error."""
SPIN_CYCLES = 1_200_000
"""Cycles for which a GPU waits before a timed call, so that launches are queued when it begins: about 0.6 ms of the CPU's time."""
SUBJECT = "gemmtune.declaration.subject"
"""Module of GEMMs whose calls need gemmtune."""
KEPT, KEPT_ON_GPU, KEPT_BYTES = 400, 8, 2**26
"""Number of earlier results whose memory no later one may have, and the size of all of them. The latest one always counts."""


class Program:
    """One loaded GEMM, the memory of its operands, and the questions about it."""

    def __init__(self, opening: Mapping[str, Any], memory: int) -> None:
        self._device: str = opening["device"]
        self._copy, self._set, self._detach = torch.Tensor.copy_, torch.Tensor.set_, torch.Tensor.detach
        self._type, self._parameter = torch.Tensor, torch.nn.Parameter
        cuda: Any = torch.cuda
        self._events: Any = getattr(torch._C, "_CudaEventBase", None)
        self._wait: Any = getattr(torch._C, "_cuda_synchronize", None)
        self._current_stream, self._on_stream, self._sleep = cuda.current_stream, cuda.stream, cuda._sleep
        self._set_profiling: Any = profiler._set_is_profiler_enabled
        self._memory = shared(opening, memory)
        self._flush, self._is_there = flusher(self._device), reader_of_memory(self._device)
        load_products(self._device)
        if opening["twin"]:
            change_torch()
        # It is watched too. Its import asks for GPUs, after which no fork of the first process could use one.
        importlib.import_module("torch.utils.benchmark")
        self._previous: deque[tuple[object, tuple[int, int]]] = deque(maxlen=KEPT if self._device == "cpu" else KEPT_ON_GPU)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._operands: dict[str, tuple[torch.Tensor, object]] = {}
        self._age: Any = torch.autograd.graph.increment_version
        target = opening["target"]
        self._note, self.events = journal.journal([os.path.abspath(root) for root in target["roots"]])
        self._be_silent, self._draw = wires.wired(self._note, reach.paths()[2]), wires.drawing(self._note)
        self._state = State(self._device)
        self._environment = system.environment(os.environ)
        self._variables = self._environment()
        self.check = seal.checker(seal.sealed(_spaces()), self._note)

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
        self._functions = functions
        declared = {name: plain for name, function in functions.items() if (plain := plain_traits(function)) is not None}
        return {
            "functions": names,
            "name": str(getattr(found, "__name__", "")),
            "traits": plain_traits(found),
            "declared": declared,
            "parameters": {name: parameters_of(function) for name, function in functions.items()},
            "inputs": getattr(found, "gemm_inputs", None),
            "ours": any(kind.__module__ == SUBJECT and kind.__name__ == "Subject" for kind in type(found).__mro__),
        }

    def call(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Call the GEMM once. Its result goes to the place that the question names.

        Count the operations of torch, in any thread, and the kernels that it runs if the question asks for them. The stack is then
        the same as without.
        """
        counter = self._counter() if question["profiled"] else None
        try:
            answer = self._called(question)
        finally:
            self._stop(counter)
        return answer if counter is None else answer | {"ran": dict(Counter(event.name for event in counter.function_events or ()))}

    def _counter(self) -> Any:
        """Start torch's profiler."""
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        counter: Any = profile(
            use_kineto=True, use_device=None if self._device == "cpu" else "cuda", experimental_config=everywhere
        )
        self._be_silent(True)
        counter.__enter__()
        self._be_silent(False)
        self._set_profiling(False)  # a flag that Python code reads; torch's own does not see a profiler of all threads
        return counter

    def _stop(self, counter: Any) -> None:
        self._be_silent(True)
        if counter is not None:
            counter.__exit__(None, None, None)
        self._be_silent(False)

    def _called(self, question: Mapping[str, Any]) -> dict[str, Any]:
        known, self._operands = self._operands if question["same"] else {}, {}
        args = [self._operand(x, known) for x in question["args"]]
        kwargs = {name: self._value(x) for name, x in question["kwargs"].items()}
        function = manners.in_manner(
            manners.watched(self._functions[question["function"]], self._note), question["manner"], self._keep
        )
        if question["same"]:  # other calls find torch's random numbers as they were
            self._draw()
        self._state.set_flags(question["flags"])
        if self._device != "cpu":
            return self._on_gpu(function, args, kwargs, question)
        return self._delivered(function(*args, **kwargs), args, question)

    def state(self, _question: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is no longer as it was before the GEMM was imported."""
        before, now = self._variables, self._environment()
        environment = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
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
        device_us = graph_us(function, args, kwargs) if question["in_graph"] else events.elapsed_time(begun, ended) * 1e3
        return answer | {"device_us": device_us}

    def _delivered(self, result: Any, args: Sequence[Any], question: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a result to its place, and describe it."""
        answer: dict[str, Any] = {"type": type(result).__name__}
        if not isinstance(result, self._type):
            return answer
        if not is_plain(result):
            return answer | {"type": f"{answer['type']} without memory of its own"}
        kept, (begin, end), nbytes = [*self._previous], addresses(result), result.numel() * result.element_size()
        if (is_other := type(result) not in (self._type, self._parameter)) or not self._is_there(begin, end):
            self._note("lazy", f"{type(result).__name__}, which is no plain tensor" if is_other else FILLED)
        if end - begin < nbytes:
            self._note("lazy", "elements that share memory, so that none can be written")
        if result.is_neg() or result.is_conj():
            self._note("lazy", "numbers whose signs change when they are read")
        self._keep(result)
        answer |= {"dtype": str(result.dtype).removeprefix("torch."), "size": list(result.shape), "device": result.device.type}
        given = [addresses(x) for x in args if isinstance(x, self._type)]
        answer["alias"] = any(low < end and begin < high for low, high in given)
        answer["again"] = any(low < end and begin < high for _, (low, high) in kept)
        if "out" in question["kwargs"]:
            return answer | {"alias": False, "again": False}
        if nbytes <= question["room"]:
            target = self._view(question["result"], nbytes, str(result.dtype).removeprefix("torch."), result.shape, None, 0)
            self._copy(target, result)
        return answer

    def _keep(self, result: Any) -> None:
        """Hold the memory of a result by a view, as a caller may do. An honest GEMM gets other memory for the next."""
        kept = self._previous
        if isinstance(result, self._type) and is_plain(result):
            kept.append((self._detach(result), addresses(result)))
        while len(kept) > 1 and sum(high - low for _, (low, high) in kept) > KEPT_BYTES:
            kept.popleft()

    def _operand(self, word: Any, known: Mapping[str, tuple[torch.Tensor, object]]) -> Any:
        """Return an argument: the tensor of the call before if it lies at the same place, perhaps with other numbers."""
        value, form = known.get(str(word), (None, None))
        if value is not None and form == manners.form(value):
            self._age(value)  # as an optimizer does that writes new numbers
        else:
            value = self._value(word)
        if isinstance(value, self._type) and value.layout == torch.strided:
            self._operands[str(word)] = value, manners.form(value)
        return value

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
        steps = torch.empty(size, device="meta").stride() if stride is None else stride
        if isinstance(self._memory, torch.Tensor):
            return self._memory.view(kind).as_strided(size, steps, at // kind.itemsize + offset)
        if not nbytes:
            return torch.empty(size, dtype=kind)
        storage = torch.frombuffer(self._memory, dtype=torch.uint8, offset=at, count=nbytes).untyped_storage()
        return self._set(torch.empty(0, dtype=kind), storage, offset, size, steps)


def _spaces() -> list[tuple[str, Mapping[str, Any], list[str]]]:
    """Return what answers rest on: this package, Python's builtins and JSON, and torch's profiler."""
    whole = (
        json, json.encoder, json.decoder, copies, journal, loading, manners, parts, places, reach, seal, state, system, tables,
        wires, json.JSONEncoder, json.JSONDecoder, Program, State, parts.Part,
    )  # fmt: skip
    parsed = (profiler.profile, profiler_util.FunctionEvent, profiler_util.EventList)
    spaces: list[tuple[str, Mapping[str, Any], list[str]]] = [
        (owner.__name__, vars(owner), list(vars(owner))) for owner in (*whole, *parsed)
    ]
    spaces.append((__name__, globals(), list(globals())))
    for owner in (builtins, profiler):
        spaces.append((owner.__name__, vars(owner), [name for name, value in vars(owner).items() if callable(value)]))
    return spaces


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MOST_CHARS]
    except Exception:  # noqa: BLE001 - an error of the GEMM that has no text
        return type(error).__name__[:MOST_CHARS]


def serve(fd: int, memory: int) -> int | None:
    """Answer the questions about one GEMM from the pipe ``fd`` until it is closed.

    Return the status with which the process is to end, if a question says so.

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

    for question in seal.messages(fd):
        answer: dict[str, Any] = {"nonce": question["nonce"], "ok": True}
        try:
            if question["do"] == "open":
                program = Program(question, memory)
                check, events = program.check, program.events
                handlers = {"call": program.call, "state": program.state}
                answer |= program.opened(question)
            elif question["do"] != "end":
                assert check is not None
                check()
                answer |= handlers[question["do"]](question)
        except Exception as error:  # noqa: BLE001 - whatever the GEMM raises is its answer
            answer |= {"ok": False, "error": described(error)}
        if check is not None:
            check()
        answer["events"] = events()
        send(answer)
        if question["do"] == "end":
            return 1
    return None
