"""Makes contenders: a choice's kernel over the operand sets of a problem, as it is to be timed.

No contender finds in a cache what another does not. On a GPU every sample begins with the same operand set and an L2 full of other
numbers, and within a sample a set comes again only after several times the L2; what a kernel keeps for its partial sums lies at
several places in memory, as there is luck in each. On a CPU the calls of all contenders go through one rotation over several times
the last cache.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

import torch

from ..choice import Choice, Kernel
from ..device import DeviceInfo
from ..numerics.operands import Operands
from ..problem import Problem
from ..settings import Timing
from .contenders import GRAPH_US, Call, Contender, CpuContender, EagerContender, GraphContender
from .rotation import Rotation

PLACES = 2
"""Graphs, of a stream each, that one sample is made of: libraries and kernels keep memory for partial sums for each. Where it lies
changes the time of a kernel by up to 7%: with one place, the luck of a process decides between two that are near. More would count
in the zeroing of that memory, with which a replay begins, too often."""
PART_US = 300.0
"""How long a sample should last of a problem that has weights in common with others."""
FLUSH_CACHES = 4
"""Times the L2 that is read before a sample: its replacement of lines is not strictly that of the oldest."""


@functools.cache
def _capture_streams(index: int) -> tuple[torch.cuda.Stream, ...]:
    """The streams on which this process captures: for each further one cuBLAS would keep a workspace of its own."""
    return tuple(torch.cuda.Stream(torch.device("cuda", index)) for _ in range(PLACES))  # type: ignore[no-untyped-call]


class Timer:
    """Makes contenders for one problem on one device, and for those that differ from it in having fewer rows. Holds the operand
    sets, which all contenders of one M share.

    Where no graph replays the kernel (on a CPU, and with ``eager``) a contender is the call as a user makes it: it allocates its
    result, and ``host_us`` is what the look-up of a call costs the host before it comes to the kernel. ``operands`` are copied;
    random ones are made where there are none.
    """

    def __init__(
        self,
        problem: Problem,
        device: DeviceInfo,
        mode: Timing,
        *,
        host_us: float = 0.0,
        operands: Operands | None = None,
    ) -> None:
        self._problem = problem
        self._device = device.torch_device
        self._as_called = mode == "eager" or device.type == "cpu"
        self._host_us = host_us
        self._rotation = Rotation(problem, device, operands)
        self._sets = self._rotation.sets
        self._turns = itertools.count()
        self._sample_us = GRAPH_US
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if device.type != "cpu":
            self._streams = _capture_streams(device.index)
            self._flushed_by = torch.zeros(FLUSH_CACHES * device.l2_bytes // 4, device=self._device)
            self._spacer = torch.zeros(1, device=self._device) if mode == "spaced" else None

    def at(self, part: Problem) -> Timer:
        """The timer for ``part``, a problem with fewer rows, of whose operands those that all rows share are the same memory. Its
        samples are short: there are many such problems, of which most need to be known within a few percent."""
        timer = copy.copy(self)
        timer._problem, timer._sets, timer._turns = part, self._rotation.of_rows(part), itertools.count()
        timer._sample_us = PART_US
        return timer

    def contender(self, choice: Choice, kernel: Kernel) -> Contender:
        """Warm the kernel up and make it ready. What the kernel raises is not caught."""
        sets = self._rotation.packed(self._sets, choice)
        calls = _eager_calls(self._problem, kernel, sets) if self._as_called else _calls(kernel, sets)
        if not self._streams:
            return CpuContender(calls, turns=self._turns, host_us=self._host_us)
        for stream in self._streams:  # the operands were filled and packed on the caller's stream
            stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._as_called:
            return EagerContender(calls, self._streams[0], flush=self._flush, host_us=self._host_us)
        if self._spacer is not None:
            calls = [functools.partial(_spaced, call, self._spacer) for call in calls]
        return GraphContender(calls, *self._streams, flush=self._flush, sample_us=self._sample_us)

    def _flush(self) -> None:
        """Fill the L2 with other numbers. Reads, since what was written would have to leave the L2 while the kernel runs."""
        self._flushed_by.sum()


def _calls(kernel: Kernel, sets: Sequence[Operands]) -> list[Call]:
    """One call for each operand set, into the set's own output."""
    return [functools.partial(kernel.run, s.out, s.tensors, s.scalars) for s in sets]


def _spaced(call: Call, spacer: torch.Tensor) -> None:
    """The call and a kernel that takes about a microsecond, which every contender has alike in its time."""
    call()
    spacer.add_(1)


def _eager_calls(problem: Problem, kernel: Kernel, sets: Sequence[Operands]) -> list[Call]:
    """Calls as an operation without ``out=`` makes them, which allocate the result within. A strided ``out`` was given."""
    if problem.out.offset or not problem.out.row_major or not sets[0].out.is_contiguous():
        return _calls(kernel, sets)
    if kernel.run_new is not None:
        return [functools.partial(kernel.run_new, s.tensors, s.scalars) for s in sets]

    def bound(s: Operands) -> Call:
        run, a, tensors, scalars, size, dtype = kernel.run, s.a, s.tensors, s.scalars, s.out.size(), s.out.dtype
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
