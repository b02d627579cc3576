"""Timing of one kernel: in a CUDA graph, in a loop on a GPU, in a loop on a CPU.

A **contender** is a kernel made ready to be timed. ``begin`` starts one sample and ``result_us`` waits for it; on a GPU several
contenders can be begun one after the other before the first result is asked for, so that the device never idles between them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from ..choice import Choice, Kernel
from ..device import DeviceInfo
from ..numerics.operands import Operands
from ..problem import Problem
from ..settings import Timing
from .rotation import Rotation

__all__ = ["Contender", "Timer", "collection_paused", "median_margin", "timing_event"]

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
GRAPH_US = 1000.0
"""How long one replay should last: the events around it cost 2–4 µs."""
MOST_GRAPH_CALLS = 256
EAGER_US = 1000.0
CPU_US = 200.0
"""How long a batch of calls should last: a clock reading and the loop around it cost about 0.1 µs."""
SHORT_US = 20_000.0
"""Calls shorter than this are made three times for a first idea of their time."""
MOST_CALLS = 10_000

Call = Callable[[], object]


class Contender(ABC):
    """One kernel, ready to be timed.

    ``rough_us`` is the least time of a few single calls when it was made ready: an upper bound, with a launch from Python in it.
    """

    rough_us: float
    takes_capture = False
    """The first sample costs more than its time."""

    @abstractmethod
    def begin(self) -> None:
        """Start one sample: a batch of calls over the operand sets."""

    @abstractmethod
    def result_us(self) -> float:
        """The time of one call in µs, in the sample that was begun last."""

    def sample_us(self) -> float:
        """Begin a sample and wait for it."""
        self.begin()
        return self.result_us()


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """The one stream on which this process captures: for each further one cuBLAS would keep a workspace of its own."""
    return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]


class Timer:
    """Makes contenders for one problem on one device. Holds the operand sets, which all contenders share."""

    def __init__(self, problem: Problem, device: DeviceInfo, mode: Timing) -> None:
        self._problem = problem
        self._device = device.torch_device
        self._mode = mode
        self._rotation = Rotation(problem, device)
        self._contenders = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type != "cpu":
            self._stream = _capture_stream(device.index)

    def contender(self, choice: Choice, kernel: Kernel) -> Contender:
        """Warm the kernel up and make it ready. What the kernel raises is not caught."""
        sets = self._rotation.for_choice(choice)
        if self._stream is not None:  # the operands were filled and packed on the caller's stream
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        calls = _eager_calls(self._problem, kernel, sets) if self._mode == "eager" else _calls(kernel, sets)
        calls = self._from_elsewhere(calls)
        if self._stream is None:
            return CpuContender(calls)
        if self._mode == "eager":
            return EagerContender(calls, self._stream)
        return GraphContender(calls, self._stream)

    def _from_elsewhere(self, calls: list[Call]) -> list[Call]:
        """The calls, begun at a set far from where the other contenders begin: what one has just used, another would find cached.

        Multiples of the golden ratio, modulo 1, keep their distance from each other however many there are.
        """
        begin = int(len(calls) * (self._contenders * GOLDEN_RATIO % 1))
        self._contenders += 1
        return calls[begin:] + calls[:begin]


class CpuContender(Contender):
    """Calls in a loop between two readings of the clock."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._cycle = itertools.cycle(calls)
        next(self._cycle)()  # the first call loads code and wakes threads
        self._count = 1
        self.rough_us = self.sample_us()
        for _ in range(2 if self.rough_us < SHORT_US else 0):  # another process may have had the core
            self.rough_us = min(self.rough_us, self.sample_us())
        self._count = _count(CPU_US, self.rough_us, MOST_CALLS)

    def begin(self) -> None:
        batch = list(itertools.islice(self._cycle, self._count))
        begun = time.perf_counter_ns()
        for call in batch:
            call()
        self._elapsed_ns = time.perf_counter_ns() - begun

    def result_us(self) -> float:
        return self._elapsed_ns / 1e3 / self._count


class EagerContender(Contender):
    """Calls from Python, the host's cost included: a call takes as long as the slower of the host and the GPU."""

    def __init__(self, calls: Sequence[Call], stream: torch.cuda.Stream) -> None:
        self._cycle = itertools.cycle(calls)
        self._stream = stream
        self._count = 2
        self.sample_us()
        self.rough_us = self.sample_us()
        self._count = _count(EAGER_US, self.rough_us, MOST_CALLS)

    def begin(self) -> None:
        batch = list(itertools.islice(self._cycle, self._count))
        self._stream.synchronize()
        begun = time.perf_counter_ns()
        with torch.cuda.stream(self._stream):
            for call in batch:
                call()
        self._stream.synchronize()
        self._elapsed_ns = time.perf_counter_ns() - begun

    def result_us(self) -> float:
        return self._elapsed_ns / 1e3 / self._count


class GraphContender(Contender):
    """A CUDA graph of calls over the operand sets, replayed between two events: kernel time alone."""

    takes_capture = True

    def __init__(self, calls: Sequence[Call], stream: torch.cuda.Stream) -> None:
        self._calls = calls
        self._stream = stream
        self._start = timing_event()
        self._end = timing_event()
        # On the capturing stream, so that workspaces that libraries keep for each stream exist before the capture.
        with torch.cuda.stream(stream):
            calls[0]()
            self.rough_us = min(self._single_us(call) for call in itertools.islice(itertools.cycle(calls), 3))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._count = min(max(_count(GRAPH_US, self.rough_us, MOST_GRAPH_CALLS), len(calls)), MOST_GRAPH_CALLS)

    def begin(self) -> None:
        with torch.cuda.stream(self._stream):
            if self._graph is None:
                self._graph = _captured(list(itertools.islice(itertools.cycle(self._calls), self._count)))
                self._graph.replay()  # the first replay uploads the graph
            self._start.record()
            self._graph.replay()
            self._end.record()

    def result_us(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / self._count

    def _single_us(self, call: Call) -> float:
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3


def timing_event() -> torch.cuda.Event:
    """An event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, captured on the current stream.

    Not by ``torch.cuda.graph``: that collects garbage and empties the allocator's cache each time, which takes longer than the
    measurement.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture is broken by the error that matters, which is on its way
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


def _count(wanted_us: float, call_us: float, most: int) -> int:
    return max(1, min(math.ceil(wanted_us / max(call_us, 0.01)), most))


def _calls(kernel: Kernel, sets: Sequence[Operands]) -> list[Call]:
    """One call for each operand set, into the set's own output."""

    def bound(s: Operands) -> Call:
        run, out, tensors, scalars = kernel.run, s.out, s.tensors, s.scalars
        return lambda: run(out, tensors, scalars)

    return [bound(s) for s in sets]


def _eager_calls(problem: Problem, kernel: Kernel, sets: Sequence[Operands]) -> list[Call]:
    """Calls as an operation without ``out=`` makes them, which allocate the result within. A strided ``out`` was given."""
    if problem.out.offset or not problem.out.row_major or not sets[0].out.is_contiguous():
        return _calls(kernel, sets)

    def bound(s: Operands) -> Call:
        run, a, tensors, scalars = kernel.run, s.a, s.tensors, s.scalars
        run_new, size, dtype = kernel.run_new, s.out.size(), s.out.dtype
        if run_new is not None:
            return lambda: run_new(tensors, scalars)
        return lambda: run(a.new_empty(size, dtype=dtype), tensors, scalars)

    return [bound(s) for s in sets]


def median_margin(samples: Sequence[float]) -> tuple[float, float]:
    """(median, half the 95% interval of the median).

    From the median absolute deviation: for a normal law sd = 1.4826·MAD, and the median's standard error is 1.2533·sd/√n. Few
    samples make the margin wider, as in Student's t, whose quantile 1.96·(1 + 2.5/(n − 1)) bounds. Two samples tell little of the
    spread and one tells nothing: the margin is their whole range, or the value itself.
    """
    middle = statistics.median(samples)
    if len(samples) < 3:
        return middle, max(samples) - min(samples) if len(samples) == 2 else middle
    deviation = statistics.median(abs(s - middle) for s in samples)
    quantile = 1.96 * (1 + 2.5 / (len(samples) - 1))
    return middle, quantile * 1.2533 * 1.4826 * deviation / math.sqrt(len(samples))


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection within the block, which could fall into one contender's sample."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
