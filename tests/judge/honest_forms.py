"""Honest GEMMs of unusual form."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
import traceback
import warnings
import weakref

import numpy as np
import torch
from honest import FLOATS, declared, product


@declared()
def a_generator(a, b):
    def tiles():
        for m in range(0, a.shape[-2], 48):
            yield product(a[..., m : m + 48, :], b)

    return torch.cat([*tiles(), product(a[..., :0, :], b)], dim=-2)


class Slotted:
    __slots__ = ("gemm_traits", "lock")

    def __init__(self):
        self.lock, self.gemm_traits = threading.RLock(), FLOATS

    def __call__(self, a, b):
        with self.lock:
            return product(a, b)


slotted = Slotted()


@torch.library.custom_op("judged::mm", mutates_args=())
def custom_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.matmul(a.detach().numpy(), b.detach().numpy())))


@custom_mm.register_fake
def _(a, b):
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@declared()
def an_operator(a, b):
    return torch.ops.judged.mm(a, b)


class Wrapped:
    def __init__(self, tensor):
        self.tensor = tensor

    def __array__(self, dtype=None, copy=None):
        return self.tensor.numpy()


@declared()
def by_array_protocol(a, b):
    return torch.from_numpy(np.matmul(np.asarray(Wrapped(a)), np.asarray(Wrapped(b))))


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@declared()
def in_contexts(a, b):
    with threads(2), warnings.catch_warnings(), torch.no_grad(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return product(a, b)


@dataclasses.dataclass(frozen=True)
class Plan:
    step: int


plans = {}


@declared()
def planned_by_shape(a, b):
    step = plans.setdefault((a.shape, b.shape, a.stride()), Plan(max(1, min(96, a.shape[-1])))).step
    parts = [product(a[..., k : k + step], b[..., k : k + step, :]) for k in range(0, a.shape[-1], step)]
    return functools.reduce(torch.add, parts) if parts else product(a, b)


packed = {}


@declared()
def packed_by_id(a, b):
    """Keep a packed b for as long as b lives and its numbers stay."""
    known = packed.get(id(b))
    if known is None or known[0]() is not b or not torch.equal(known[1], b):
        packed.clear()
        known = packed[id(b)] = (weakref.ref(b), b.clone(), np.asfortranarray(b.numpy()))
    return torch.from_numpy(np.ascontiguousarray(np.matmul(a.numpy(), known[2])))


@declared()
def by_asyncio(a, b):
    async def halves():
        return await asyncio.gather(*(asyncio.to_thread(product, x, b) for x in a.tensor_split(2, dim=-2)))

    return torch.cat(asyncio.run(halves()), dim=-2)


@functools.cache
def generated(step):
    space = {}
    source = f"def body(a, b, f, cat):\n    return cat([f(x, b) for x in a.split({step}, dim=-2)], dim=-2)\n"
    exec(compile(source, f"<generated {step}>", "exec"), space)
    return space["body"]


@declared()
def of_generated_code(a, b):
    return generated(64)(a, b, product, torch.cat)


logger = logging.getLogger("fallback")


@declared()
def logs_an_error(a, b):
    try:
        raise np.linalg.LinAlgError("no tile for this shape")
    except np.linalg.LinAlgError:
        logger.exception("another way")
        traceback.format_exc()
        return product(a, b)


@torch.jit.script
def by_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.size(0), b.size(1), dtype=a.dtype)
    for k in range(a.size(1)):
        total = total + a[:, k : k + 1] * b[k : k + 1, :]
    return total


@declared(ops=["mm"])
def scripted(a, b):
    return by_columns(a, b)
