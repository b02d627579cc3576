"""Ways in which programs call a GEMM, unlike a judge: in a thread, in inference mode, without a pause, on tensors of their own."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
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


def copied(x: Any, offset: int, changed: Sequence[float] | None) -> Any:
    """Return a copy of a tensor after so many elements. If it is ``changed``, its columns go from the last to the first.

    Two shares of its sides are the place of the only number that is another one.
    """
    if not isinstance(x, TENSOR) or x.layout != STRIDED:
        return x
    copy = x.clone()
    if offset:
        copy = x.new_empty(copy.numel() + offset).as_strided(copy.shape, copy.stride(), offset).copy_(x)
    if changed:
        place: Any = (..., *(int(share * size) for share, size in zip(changed, x.shape[-2:], strict=False)))
        copy[place] = copy[place] == 0
        return copy
    return copy if changed is None else copy.copy_(x.flip(-1))


def in_manner(function: Callable[..., Any], manner: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return a function that calls another one as programs do, and returns the result of its last call. No manner: the other one.

    Args:
        manner: ``mode`` of torch, the number of ``times``, elements before each tensor as the ``offset``, and True or False for a
            ``thread`` of its own, for ``one_core`` alone, and for the last argument as the ``parameter`` of a module. The first
            argument is made in the mode, as activations are. Calls before the last one have numbers that are ``changed``.
    """
    if manner is None:
        return function
    parameter = torch.nn.Parameter
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    threads, set_threads = torch.get_num_threads, torch.set_num_threads
    cores, set_cores = os.sched_getaffinity, os.sched_setaffinity

    def called(*args: Any, **kwargs: Any) -> Any:
        last, offset = manner["times"] - 1, manner["offset"]
        first, *others = args
        changes = [*[manner["changed"]] * last, None]
        given = [[copied(x, offset, changed) for x in others] for changed in changes]
        if manner["parameter"]:
            given = [[*own[:-1], parameter(own[-1], requires_grad=False)] for own in given]

        def work() -> Any:
            allowed = cores(0)
            if manner["one_core"]:
                set_cores(0, {min(allowed)})
            try:
                with MODES[manner["mode"]]():
                    activations = [copied(first, offset, changed) for changed in changes]
                    for own, weights in zip(activations, given, strict=True):
                        result = function(own, *weights, **kwargs)
            finally:
                set_cores(0, allowed)
            return result

        before = threads()
        if manner["one_core"]:
            set_threads(1)
        try:
            return _thread.submit(work).result() if manner["thread"] else work()
        finally:
            set_threads(before)

    return called
