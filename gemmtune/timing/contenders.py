"""Contenders: kernels prepared for timing, in CUDA graphs, in a loop on a GPU or in a loop on a CPU.

``begin`` starts one sample and ``result_us`` waits for it. On a GPU several contenders can begin before the first result is
read, so that the device never idles between them.
"""

import contextlib
import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from .rotation import MOST_SETS

GRAPH_US = 1000.0
"""Duration of one sample. The events around it cost 2–4 µs."""
MOST_GRAPH_CALLS = MOST_SETS
"""Upper limit that lets a sample use operand sets once even if they are too small to overflow the L2."""
EAGER_US = 1000.0
CPU_US = 200.0
"""Duration of a batch of calls. Reading the clock and looping cost about 0.1 µs."""
SHORT_US, LONG_US = 20_000.0, 1000.0
"""Durations of a call, on a CPU and on a GPU, below which it is run three times for a first estimate.

Longer ones on a GPU are sampled on one stream only, because little of their time depends on a place in memory.
"""
MOST_CALLS = 10_000

Call = Callable[[], object]


class Contender(ABC):
    """One prepared kernel. ``rough_us`` bounds its time: the least of a few single calls, with a launch from Python."""

    rough_us: float
    takes_capture = False
    """Flag for a first sample that costs more than the time it reports."""

    @abstractmethod
    def begin(self) -> None:
        """Start one sample: a batch of calls over the operand sets."""

    @abstractmethod
    def result_us(self) -> float:
        """Return the time of one call in µs, in the latest sample."""

    def sample_us(self) -> float:
        """Begin a sample and wait for it."""
        self.begin()
        return self.result_us()


class KernelContender(Contender):
    """A contender over the operand sets of a timer."""

    @abstractmethod
    def repeats(self) -> Sequence[Call]:
        """Return the ways in which a sample computes with the first set, as calls that return the result or leave it in the set."""


class CpuContender(KernelContender):
    """Calls in a loop between two clock readings, ``host_us`` of host time each. Contenders may share the set order ``turns``."""

    def __init__(self, calls: Sequence[Call], *, turns: Iterator[int] | None = None, host_us: float = 0.0) -> None:
        self._calls = calls
        self._turns = turns or itertools.count()
        self._host_us = host_us
        self._batch(1)[0]()  # the first call loads code and wakes threads
        self._count = 1
        self.rough_us = self.sample_us()
        for _ in range(2 if self.rough_us < SHORT_US else 0):  # another process may have had the core
            self.rough_us = min(self.rough_us, self.sample_us())
        self._count = _count(CPU_US, self.rough_us, MOST_CALLS)

    def _batch(self, count: int) -> list[Call]:
        return [self._calls[turn % len(self._calls)] for turn in itertools.islice(self._turns, count)]

    def begin(self) -> None:
        batch = self._batch(self._count)
        begun = time.perf_counter_ns()
        for call in batch:
            call()
        self._elapsed_ns = time.perf_counter_ns() - begun

    def result_us(self) -> float:
        return self._elapsed_ns / 1e3 / self._count + self._host_us

    def repeats(self) -> Sequence[Call]:
        return self._calls[:1]


class EagerContender(KernelContender):
    """Calls from Python, each as long as the slower of the GPU and the host, which is busy for ``host_us`` before the kernel."""

    def __init__(
        self, calls: Sequence[Call], stream: torch.cuda.Stream, *, flush: Call = lambda: None, host_us: float = 0.0
    ) -> None:
        self._calls = [_later(call, host_us) for call in calls] if host_us else calls
        self._stream = stream
        self._flush = flush
        self._count = 2
        self.sample_us()
        self.rough_us = self.sample_us()
        self._count = _count(EAGER_US, self.rough_us, MOST_CALLS)

    def begin(self) -> None:
        batch = list(itertools.islice(itertools.cycle(self._calls), self._count))
        with torch.cuda.stream(self._stream):
            self._flush()
            self._stream.synchronize()
            begun = time.perf_counter_ns()
            for call in batch:
                call()
        self._stream.synchronize()
        self._elapsed_ns = time.perf_counter_ns() - begun

    def result_us(self) -> float:
        return self._elapsed_ns / 1e3 / self._count

    def repeats(self) -> Sequence[Call]:
        return [functools.partial(_awaited, self._calls[0], self._stream)]


class GraphContender(KernelContender):
    """CUDA graphs of calls, one per stream with its memory, between two events: kernel time only. A long call has one graph."""

    takes_capture = True

    def __init__(
        self,
        calls: Sequence[Call],
        stream: torch.cuda.Stream,
        *others: torch.cuda.Stream,
        flush: Call = lambda: None,
        sample_us: float = GRAPH_US,
    ) -> None:
        self._calls = calls
        self._stream = stream
        self._flush = flush
        self._start = timing_event()
        self._end = timing_event()
        with torch.cuda.stream(stream):
            calls[0]()
            self.rough_us = self._single_us(calls[-1])
            for call in calls[:2] if self.rough_us < LONG_US else ():
                self.rough_us = min(self.rough_us, self._single_us(call))
        self._others = others if self.rough_us < LONG_US else ()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        count = min(max(_count(sample_us, self.rough_us, MOST_GRAPH_CALLS), len(calls)), MOST_GRAPH_CALLS)
        self._share = math.ceil(count / (1 + len(self._others)))
        self._count = self._share * (1 + len(self._others))

    def begin(self) -> None:
        with torch.cuda.stream(self._stream):
            if not self._graphs:
                self._capture()
            self._flush()
            self._start.record()
            for graph in self._graphs:
                graph.replay()
            self._end.record()

    def _capture(self) -> None:
        calls = itertools.cycle(self._calls)
        for stream in (self._stream, *self._others):
            stream.wait_stream(self._stream)
            with torch.cuda.stream(stream):
                if stream is not self._stream:
                    self._calls[0]()  # memory that is kept for each stream has to exist before the capture
                self._graphs.append(_captured(list(itertools.islice(calls, self._share))))
            self._stream.wait_stream(stream)
        for graph in self._graphs if self.rough_us < LONG_US else ():
            graph.replay()  # the first replay uploads the graph, which takes microseconds

    def result_us(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / self._count

    def repeats(self) -> Sequence[Call]:
        if not self._graphs:
            self.sample_us()
        return [functools.partial(_awaited, call, self._stream) for call in (self._graphs[0].replay, self._calls[0])]

    def _single_us(self, call: Call) -> float:
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3


def timing_event() -> torch.cuda.Event:
    """Return an event that records its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls on the current stream. ``torch.cuda.graph`` would collect garbage for longer than it measures."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the original error broke the capture and is raised below
            graph.capture_end()
        _end_broken_capture(pool)
        raise
    graph.capture_end()
    return graph


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture the block's work in ``graph``. After a failure torch works as before; torch alone keeps the wrong stream."""
    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        torch.cuda.synchronize()  # raises if the broken capture left the device unusable
        _end_broken_capture(pool)
        raise


def _end_broken_capture(pool: tuple[int, int]) -> None:
    """Tell torch that a failed capture is over. It would count it among the running ones, and later ones could get its memory."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # where torch has ended the allocations itself
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
    renew_generator()


def renew_generator() -> None:
    """Let the device's generator draw again after a failed capture, which it would otherwise assume to be running."""
    if torch.cuda.is_available():
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


def _awaited(call: Call, stream: torch.cuda.Stream) -> object:
    """Return the result of a call on a stream after waiting for it."""
    with torch.cuda.stream(stream):
        result = call()
    stream.synchronize()
    return result


def _later(call: Call, host_us: float) -> Call:
    """Return the call, delayed by ``host_us`` of host work."""
    host_ns = round(1e3 * host_us)

    def later() -> object:
        end = time.perf_counter_ns() + host_ns
        while time.perf_counter_ns() < end:
            pass
        return call()

    return later


def _count(wanted_us: float, call_us: float, most: int) -> int:
    return max(1, min(math.ceil(wanted_us / max(call_us, 0.01)), most))
