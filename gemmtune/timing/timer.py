"""Maker of contenders: a choice's kernel over the operand sets of a problem, prepared for timing.

No contender finds data in a cache that another one does not find. On a GPU every sample begins with the same operand set and
an L2 full of other numbers. Within a sample a set recurs only after several times the L2. Memory for partial sums lies at
several places, because each place changes the time. On a CPU the calls of all contenders go through one rotation over several
times the last cache.
"""

import contextlib
import copy
import functools
import gc
import itertools
import logging
import math
import statistics
from collections.abc import Iterator, Sequence

import torch

from ..cache import cache_dir
from ..cache.locking import file_lock
from ..choice import Choice, Kernel
from ..device import DeviceInfo
from ..errors import UnavailableError
from ..numerics.operands import Operands
from ..problem import Problem
from ..problem.flags import precision_scope
from ..settings import Settings, Timing
from .contenders import GRAPH_US, Call, CpuContender, EagerContender, GraphContender, KernelContender
from .overwritten import Overwritten
from .rotation import Rotation

PLACES = 2
"""Number of graphs in one sample, each with a separate stream.

Libraries and kernels keep memory for partial sums for each stream, and its place changes a kernel's time by up to 7%. With
one place, chance would decide between two close kernels. A replay begins by zeroing that memory, which more places would
count too often.
"""
PART_US = 300.0
"""Duration of a sample of a problem that shares its weights with others."""
FLUSH_CACHES = 4
"""Multiple of the L2 that is read before a sample, because the L2 does not strictly replace its oldest lines."""


@functools.cache
def _capture_streams(index: int) -> tuple[torch.cuda.Stream, ...]:
    """Return the streams on which this process captures. cuBLAS keeps a separate workspace for each further stream."""
    return tuple(torch.cuda.Stream(torch.device("cuda", index)) for _ in range(PLACES))  # type: ignore[no-untyped-call]


class Timer:
    """Maker of contenders for one problem on one device, and for the same problem with fewer rows.

    It holds the operand sets, which all contenders of one M share. If no graph replays the kernel (on a CPU, and with
    ``eager``) a contender is the call as a user makes it. It allocates its result, and ``host_us`` is the host time of a
    call's look-up before the kernel. ``operands`` are copied, and random ones are made by default.
    """

    def __init__(
        self, problem: Problem, device: DeviceInfo, mode: Timing, *, host_us: float = 0.0, operands: Operands | None = None
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

    def at(self, part: Problem) -> "Timer":
        """Return the timer for ``part`` of fewer rows, which shares memory and has short samples, precise to a few percent."""
        timer = copy.copy(self)
        timer._problem, timer._sets, timer._turns = part, self._rotation.of_rows(part), itertools.count()
        timer._sample_us = PART_US
        return timer

    def contender(self, choice: Choice, kernel: Kernel) -> KernelContender:
        """Warm up the kernel and prepare it for timing. Exceptions of the kernel are not caught."""
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

    def call(self, choice: Choice, kernel: Kernel) -> Call:
        """Return a call with the first operand set, as a user makes it. It returns the result, or None if that is in the output."""
        s = self._rotation.packed(self._sets[:1], choice)[0]
        run = functools.partial(kernel.run, s.out) if kernel.run_new is None else kernel.run_new
        return functools.partial(run, s.tensors, s.scalars)

    @contextlib.contextmanager
    def overwritten(self, new: Operands) -> Iterator[Overwritten]:
        """Let the first operand set get the values of ``new`` within the block, in the same memory."""
        live = Overwritten(self._sets[0], new, lambda choice: self._rotation.packed(self._sets, choice)[0].named["b"])
        try:
            yield live
        finally:
            live.restore()

    def _flush(self) -> None:
        """Fill the L2 with other numbers by reading, because written lines would leave the L2 while the kernel runs."""
        self._flushed_by.sum()


def _calls(kernel: Kernel, sets: Sequence[Operands]) -> list[Call]:
    """Return one call for each operand set, into the set's output."""
    return [functools.partial(kernel.run, s.out, s.tensors, s.scalars) for s in sets]


def _spaced(call: Call, spacer: torch.Tensor) -> None:
    """Run the call and then a kernel of about a microsecond, which is in the time of every contender."""
    call()
    spacer.add_(1)


def _eager_calls(problem: Problem, kernel: Kernel, sets: Sequence[Operands]) -> list[Call]:
    """Return calls like those of an operation without ``out=``, which allocate the result. A strided ``out`` is reused."""
    if problem.out.offset or not problem.out.row_major or not sets[0].out.is_contiguous():
        return _calls(kernel, sets)
    if kernel.run_new is not None:
        return [functools.partial(kernel.run_new, s.tensors, s.scalars) for s in sets]

    def bound(s: Operands) -> Call:
        run, a, tensors, scalars, size, dtype = kernel.run, s.a, s.tensors, s.scalars, s.out.size(), s.out.dtype

        def call() -> torch.Tensor:
            out = a.new_empty(size, dtype=dtype)
            run(out, tensors, scalars)
            return out

        return call

    return [bound(s) for s in sets]


def median_margin(samples: Sequence[float]) -> tuple[float, float]:
    """Return (median, half the 95% interval of the median).

    The interval comes from the median absolute deviation. For a normal law sd = 1.4826·MAD, and the median's standard error
    is 1.2533·sd/√n. Few samples widen the margin as in Student's t, whose quantile 1.96·(1 + 2.5/(n − 1)) bounds. Two samples
    say little about the spread, so the margin is their whole range. One sample says nothing, so the margin is its value.
    """
    middle = statistics.median(samples)
    if len(samples) < 3:
        return middle, max(samples) - min(samples) if len(samples) == 2 else middle
    deviation = statistics.median(abs(s - middle) for s in samples)
    quantile = 1.96 * (1 + 2.5 / (len(samples) - 1))
    return middle, quantile * 1.2533 * 1.4826 * deviation / math.sqrt(len(samples))


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Prevent garbage collection within the block, which could run within one contender's sample."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


log = logging.getLogger("gemmtune")

LOCK_SHARE = 0.5
"""Share of ``choice_timeout_s`` for which a measurement waits until another process has finished its measurement."""


@contextlib.contextmanager
def conditions(problem: Problem, device: DeviceInfo) -> Iterator[None]:
    """Set the problem's precision, disable gradients, select the device and set its number of threads."""
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(precision_scope(problem))
        stack.enter_context(torch.no_grad())
        if device.type != "cpu":
            stack.enter_context(torch.cuda.device(device.torch_device))
        elif device.threads and device.threads != threads:
            torch.set_num_threads(device.threads)
            stack.callback(torch.set_num_threads, threads)
        yield


@contextlib.contextmanager
def device_to_itself(settings: Settings, device: DeviceInfo) -> Iterator[None]:
    """Keep other gemmtune processes from measuring on this device at the same time, if the lock can be acquired."""
    with contextlib.ExitStack() as stack:
        try:
            path = cache_dir("locks", quietly=True) / f"measure-{_identity(device)}.lock"
            stack.enter_context(file_lock(path, LOCK_SHARE * settings.choice_timeout_s))
        except (OSError, UnavailableError) as error:
            log.debug("cannot acquire the measurement lock, measuring without it: %s", error)
        yield


def _identity(device: DeviceInfo) -> str:
    """Return a name of the device itself. Its index is another one in a process with other visible devices."""
    if device.type != "cpu" and torch.cuda.is_available():
        return str(torch.cuda.get_device_properties(device.index).uuid)
    return f"{device.type}{device.index}"
