"""Ways in which programs call a GEMM, unlike a judge: in a thread, in inference mode, without a pause, on tensors of their own."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

MODES: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip
TENSOR, STRIDED = torch.Tensor, torch.strided
_thread = ThreadPoolExecutor(1)
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 2**17
"""Option of malloc, and bytes from which memory is mapped: large tensors begin 64 bytes into a page, as in a new program."""
MOST_WIDER = 2**23
"""Most elements between the rows of a part of a wider matrix."""


def copied(x: Any, offset: int, changed: Sequence[float] | None, wider: int = 0) -> Any:
    """Return a copy of a tensor after so many elements. If it is ``changed``, its columns go from the last to the first.

    Two shares of its sides are the place of the only number that is another one. Rows are those of a matrix that is ``wider`` by
    so many columns.
    """
    if not isinstance(x, TENSOR) or x.layout != STRIDED:
        return x
    copy = x.clone()
    if offset or wider:
        wide = wider and copy.dim() == 2 and copy.stride(1) == 1
        steps = (copy.stride(0) + min(wider, MOST_WIDER // max(len(copy), 1)), 1) if wide else copy.stride()
        span = 1 + sum((size - 1) * step for size, step in zip(copy.shape, steps, strict=True))
        copy = x.new_empty(max(span, 0) + offset).as_strided(copy.shape, steps, offset).copy_(x)
    if changed:
        place: Any = (..., *(int(share * size) for share, size in zip(changed, x.shape[-2:], strict=False)))
        copy[place] = copy[place] == 0
        return copy
    return copy if changed is None else copy.copy_(x.flip(-1))


def grow(function: Callable[..., Any], own: torch.Tensor, weights: Sequence[Any]) -> None:
    """Call a function with all rows but the last one, which have other numbers then. It may refuse that size."""
    kept = own.clone()
    own.copy_(kept.flip(-1))
    with contextlib.suppress(Exception):
        function(own[..., :-1, :], *weights)
    own.copy_(kept)


@contextlib.contextmanager
def calling(function: Callable[..., Any], beside: Sequence[Sequence[Any]], kwargs: Mapping[str, Any], mode: str) -> Iterator[None]:
    """Call a function in a mode, in threads of their own, for as long as the block works."""
    ended, begun = threading.Event(), threading.Barrier(len(beside) + 1)

    def work(args: Sequence[Any]) -> None:
        begun.wait()
        with MODES[mode]():
            function(*args, **kwargs)  # at least once
            while not ended.is_set():
                function(*args, **kwargs)

    with ThreadPoolExecutor(max(len(beside), 1)) as pool:
        works = [pool.submit(work, args) for args in beside]
        begun.wait()
        try:
            yield
        finally:
            ended.set()
        for done in works:
            done.result()


@contextlib.contextmanager
def held(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Set a value for as long as the block works, or leave it if that value is None. Put back the one before in any case."""
    before = get()
    if value is not None:
        put(value)
    try:
        yield
    finally:
        put(before)


def call_in_turn(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], grows: bool, beside: contextlib.AbstractContextManager[None],
    kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Call a function with each of the arguments, and return its last result.

    Args:
        grows: True for a call without the last row before the last one.
        beside: what is done during the last call.
    """
    *earlier, last = calls
    for args in earlier:
        function(*args, **kwargs)
    if grows:
        grow(function, last[0], last[1:])
    with beside:
        return function(*last, **kwargs)


def in_manner(function: Callable[..., Any], manner: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return a function that calls another one as programs do, and returns the result of its last call. No manner: the other one.

    Args:
        manner: ``mode`` of torch, the number of ``times``, elements before each tensor as the ``offset``, elements by which its
            rows are ``wider`` apart, and True or False for a ``thread`` of its own, for ``one_core`` alone, and for the last
            argument as the ``parameter`` of a module. The first argument is made in the mode, as activations are. Calls before the
            last one have numbers that are ``changed``. If it ``grows``, a call with other numbers in the same place, without the
            last row, comes before the last one. ``beside`` more threads call too, with other numbers.
    """
    if manner is None:
        return function
    parameter, offset, wider = torch.nn.Parameter, manner["offset"], manner["wider"]
    changes = [*[manner["changed"]] * (manner["times"] - 1), None]
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    threads, set_threads = torch.get_num_threads, torch.set_num_threads
    cores, set_cores = os.sched_getaffinity, os.sched_setaffinity

    def called(*args: Any, **kwargs: Any) -> Any:
        first, *others = args
        given = [[copied(x, offset, changed, wider) for x in others] for changed in changes]
        beside = [[copied(x, offset, (), wider) for x in args] for _ in range(manner["beside"])]
        if manner["parameter"]:
            given = [[*own[:-1], parameter(own[-1], requires_grad=False)] for own in given]

        def work() -> Any:
            one = {min(cores(0))} if manner["one_core"] else None
            with held(lambda: cores(0), lambda x: set_cores(0, x), one), MODES[manner["mode"]]():
                activations = [copied(first, offset, changed, wider) for changed in changes]
                calls = [(own, *weights) for own, weights in zip(activations, given, strict=True)]
                return call_in_turn(function, calls, manner["grows"], calling(function, beside, kwargs, manner["mode"]), kwargs)

        with held(threads, set_threads, 1 if manner["one_core"] else None):
            return _thread.submit(work).result() if manner["thread"] else work()

    return called
