"""Ways in which programs call a GEMM, unlike a judge: in a thread, in inference mode, without a pause, on tensors of their own."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .copies import STRIDED, TENSOR, copied, in_one, weight, windows

globals()["__builtins__"] = dict(vars(builtins))  # its functions have builtins of their own

MODES: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip
_thread = ThreadPoolExecutor(1)
MARKS = frozenset({"_dynamo_static_input_type"})
"""Attributes that torch.compile gives parameters."""
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 2**17
"""Option of malloc, and bytes from which memory is mapped: large tensors begin 64 bytes into a page, as in a new program."""
HUGE = 0.25
"""Power of the largest number of a type by which the numbers of a huge term are multiplied."""
PARTS = (2, 3, 5, 7)
"""Divisors of K, of which the first one that fits makes fewer terms of as many numbers."""
LATE_S, DELAY_S = 1.0, 0.02
"""Limit in seconds from which a wait for other threads waits in any case, and seconds by which new ones work later."""
MANY, MANY_S = 300, 0.1
"""Most calls, and seconds, of many calls in a row."""
BESIDE, BESIDE_S = 5, 0.2
"""Most calls, and seconds, of those with others beside them, of which one is judged."""


def form(x: torch.Tensor) -> object:
    """Return what a GEMM may have changed of an operand besides its numbers."""
    return x.shape, x.stride(), x.dtype, x.data_ptr(), x.requires_grad, x.__class__, {*vars(x)} - MARKS


def watched(function: Callable[..., Any], note: Callable[[str, str], None]) -> Callable[..., Any]:
    """Return a function that calls another one, and notes if that changes more of its arguments than their numbers."""
    kind, strided, said = TENSOR, STRIDED, form

    def called(*args: Any, **kwargs: Any) -> Any:
        given = [(x, said(x)) for x in args if isinstance(x, kind) and x.layout == strided]
        result = function(*args, **kwargs)
        if any(said(x) != before for x, before in given):
            note("inputs", "the sizes, the memory, the gradients or the attributes of one")
        return result

    return called


def call_before(function: Callable[..., Any], how: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Call a function with other numbers in the places of a and b, of this size or of another one, which it may refuse."""
    own = a.detach(), b.detach()
    kept = [x.clone() for x in own]
    for x in own:
        x.copy_(x.flip(-1))
    fewer = next((k // part for part in PARTS if k % part == 0), k) if (k := a.shape[-1]) else 0
    nan, huge = (float("nan"), torch.finfo(a.dtype).max ** HUGE) if a.dtype.is_floating_point else (0, 1)
    ways: Mapping[str, Callable[[], Sequence[torch.Tensor]]] = {
        "other numbers": lambda: (a, b),
        "a row less": lambda: (a[..., :-1, :], b),
        "a column less": lambda: (a, b[..., :-1]),
        "a term less": lambda: (a[..., :-1], b[..., :-1, :]),
        "a NaN more": lambda: (torch.cat([own[0], own[0][..., :1]], -1).fill_(nan), torch.cat([own[1], own[1][..., :1, :]], -2)),
        "a huge term": lambda: (own[0].copy_(kept[0]), own[1].copy_(kept[1])[..., :1, :].mul_(huge)) and (a, b),
        "a row more": lambda: (a.as_strided((len(a) + 1, *a.shape[1:]), a.stride()), b),
        "both swapped": lambda: (b.mT, a.mT),
        "fewer terms": lambda: (a.reshape(-1, fewer), b.reshape(fewer, -1)),
        "a that does not fit": lambda: (a.flatten()[: -len(a)].view(len(a), -1), b),
        "b that does not fit": lambda: (a, b[:-1]),
    }
    with contextlib.suppress(Exception):
        function(*ways[how]())
    for x, numbers in zip(own, kept, strict=True):
        x.copy_(numbers)


def as_result(function: Callable[..., Any], a: torch.Tensor) -> torch.Tensor:
    """Return a as the changed result of an earlier call, as between two layers of a model. A GEMM may refuse that call."""
    few, (*batch, rows, columns) = max(a.shape[-1] // PARTS[-1], 1), a.shape
    with contextlib.suppress(Exception):
        if (made := function(a.new_ones(*batch, rows, few), a.new_ones(*batch, few, columns))).dtype == a.dtype:
            return made.copy_(a)  # type: ignore[no-any-return] # of a tensor
    return a


def call_many(function: Callable[..., Any], args: Sequence[Any], keep: Callable[[Any], object]) -> None:
    """Call a function often, for a short time, and keep each result, as a program with many layers does."""
    until = time.monotonic() + MANY_S
    for _ in range(MANY):
        keep(function(*args))
        if time.monotonic() > until:
            break


def rarest(call: Callable[[], Any]) -> Any:
    """Return the result of some calls which has the bits of the fewest others: calls in other threads may disturb any of them."""
    until, results = time.monotonic() + BESIDE_S, [call()]
    while len(results) < BESIDE and time.monotonic() < until:
        results.append(call())
    plain = all(type(x) is TENSOR for x in results)
    return min(results, key=lambda x: sum(torch.equal(x, other) for other in results)) if plain else results[0]


def in_loop(work: Callable[[], Any]) -> Any:
    """Return what a function returns that is called by a coroutine, as in a server or a notebook."""

    async def run() -> Any:
        return work()

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(run())


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


def as_if_late(work: Callable[[], Any]) -> Any:
    """Return what a function returns while new threads work late, and waits with a short limit end at once: the machine is busy."""
    module: Any = threading
    threads, conditions = module.Thread, module.Condition
    join, wait, run = threads.join, conditions.wait, threads.run

    def ends_at_once(waits: Callable[..., Any]) -> Any:
        return lambda self, timeout=None: waits(self, timeout if timeout is None or timeout >= LATE_S else 0)

    def late(self: Any) -> None:
        time.sleep(DELAY_S)
        run(self)

    try:
        threads.join, conditions.wait, threads.run = ends_at_once(join), ends_at_once(wait), late
        return work()
    finally:
        threads.join, conditions.wait, threads.run = join, wait, run


AROUND: Mapping[str, Callable[[Callable[[], Any]], Any]] = {
    "": lambda work: work(), "event loop": in_loop, "waits that end early": as_if_late,
}  # fmt: skip
"""What may be around a call."""


def call_in_turn(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], manner: Mapping[str, Any],
    beside: contextlib.AbstractContextManager[None], keep: Callable[[Any], object], kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Call a function with each of the arguments, and return its last result.

    Args:
        manner: ``first`` and ``before`` say what is done before the first and the last call, ``many`` if many calls are, and
            ``result`` if the last one gets an earlier result.
        beside: what is done during the last call.
        keep: keeps a result.
    """
    *earlier, last = calls
    if manner["first"]:
        call_before(function, manner["first"], *calls[0])
    for args in earlier:
        function(*args, **kwargs)
    if manner["many"]:
        call_many(functools.partial(function, **kwargs), last, keep)
    last = [as_result(function, last[0]), *last[1:]] if manner["result"] else last
    with beside:
        if manner["before"]:
            call_before(function, manner["before"], *last)  # no pause may follow
        call = functools.partial(function, *last, **kwargs)
        return rarest(call) if manner["beside"] else call()


def in_manner(
    function: Callable[..., Any], manner: Mapping[str, Any] | None, keep: Callable[[Any], object] = id
) -> Callable[..., Any]:
    """Return a function that calls another one as programs do, and returns the result of its last call. No manner: the other one.

    Args:
        manner: ``mode`` of torch, the number of ``times``, elements before each tensor as the ``offset``, elements by which its
            rows are ``wider`` apart, what is ``around`` a call, and True or False for a ``thread`` of its own, for ``one_core``
            alone, and for the last argument as a ``parameter``, which may be ``trained``, or ``mapped`` with an alignment. The
            others are made in the mode, and so is it if made ``inside``. Two may be parts of ``one`` matrix, and rows of the
            first be ``windows`` of a signal. Calls before the last have numbers that are ``changed``. ``beside`` more threads
            call. The rest is for ``call_in_turn``.
        keep: keeps a result, whose memory no later one may have.
    """
    if manner is None:
        return function
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    threads, set_threads = torch.get_num_threads, torch.set_num_threads
    cores, set_cores = os.sched_getaffinity, os.sched_setaffinity
    around, in_mode, offset, wider = AROUND[manner["around"]], MODES[manner["mode"]], manner["offset"], manner["wider"]
    changes = [*[manner["changed"]] * (manner["times"] - 1), None]

    def called(first: Any, /, *others: Any, **kwargs: Any) -> Any:
        beside = [[copied(x, offset, (), wider) for x in (first, *others)] for _ in range(manner["beside"])]
        spare = first.shape[-1] if manner["before"] == "a row more" else 0

        def weights() -> list[list[Any]]:
            given = [[copied(x, offset, changed, wider) for x in others] for changed in changes]
            return [[*own[:-1], *(weight(manner, x) for x in own[-1:])] for own in given]

        def work() -> Any:
            threads_beside = calling(function, beside, kwargs, manner["mode"])
            with held(lambda: cores(0), lambda x: set_cores(0, x), {min(cores(0))} if manner["one_core"] else None), in_mode():
                activations = [copied(first, offset, changed, wider, spare) for changed in changes]
                activations = [x if (step := manner["windows"]) < 0 else windows(x, step) for x in activations]
                given = zip(activations, made or weights(), strict=True)
                calls = [in_one(own, *rest) if manner["one"] else (own, *rest) for own, rest in given]
                return around(lambda: call_in_turn(function, calls, manner, threads_beside, keep, kwargs))

        made = [] if manner["inside"] else weights()
        with held(threads, set_threads, 1 if manner["one_core"] else None):
            return _thread.submit(work).result() if manner["thread"] else work()

    return called
