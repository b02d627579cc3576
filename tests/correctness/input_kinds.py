"""Inputs of every kind that torch has for a layer, and what is compared of two results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

Tensor = torch.Tensor
TOLERANCE = {"rtol": 2e-3, "atol": 1e-4}


class Plain(Tensor):
    """A subclass without a dispatch of its own."""


class Function(Tensor):
    """A subclass with a ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A subclass with a ``__torch_dispatch__``, whose numbers are in another tensor."""

    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapper(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


def input_kinds(k: int) -> Iterator[tuple[str, Any]]:
    """Yield the name and an input of each kind for a layer of ``k`` inputs."""
    numbers = torch.Generator().manual_seed(4)

    def new(*size: int) -> Tensor:
        return torch.randn(size, generator=numbers)

    yield from _dense(k, new)
    yield from _of_other_types(k, new)
    yield from _nested(k, new)


def _dense(k: int, new: Callable[..., Tensor]) -> Iterator[tuple[str, Any]]:
    for batch in ((), (3,), (1,), (2, 3), (2, 1, 3), (2, 1, 1, 3), (0,), (2, 0), (0, 3)):
        yield f"of size {[*batch, k]}", new(*batch, k)
    for batch in ((3,), (2, 3)):
        yield f"of other features {[*batch, k + 1]}", new(*batch, k + 1)
    yield "a number", new()
    for size in ((3, 0), (0, 0), (2, 3, 0), (2, 0, 3, 0)):
        yield f"without features {list(size)}", new(*size)
    yield "a transpose", new(k, 3).t()
    yield "a slice", new(3, 2 * k)[:, :k]
    yield "every second row", new(6, k)[::2]
    yield "with an offset", new(5, k)[2:]
    yield "misaligned", new(3 * k + 1)[1:].view(3, k)
    yield "permuted", new(3, 2, k).transpose(0, 1)
    yield "one row for all", new(1, k).expand(3, k)
    yield "one matrix for all", new(1, 3, k).expand(2, 3, k)
    yield "of stride 0 along K", new(3, 1).expand(3, k)
    yield "odd strides of size 1", new(2 * k).as_strided((2, 1, k), (k, 999, 1))
    yield "requires grad", new(3, k).requires_grad_()
    yield "batch that requires grad", new(2, 3, k).requires_grad_()
    with torch.inference_mode():
        yield "inference", new(3, k)
    yield "a Parameter", nn.Parameter(new(3, k))


def _of_other_types(k: int, new: Callable[..., Tensor]) -> Iterator[tuple[str, Any]]:
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64):
        yield str(dtype), new(3, k).to(dtype)
    yield "conjugated", torch.complex(new(3, k), new(3, k)).conj()
    yield "negated", torch._neg_view(new(3, k))
    yield "plain subclass", new(3, k).as_subclass(Plain)
    yield "subclass with functions", new(3, k).as_subclass(Function)
    yield "subclass with a dispatch", Wrapper(new(3, k))
    yield "meta", new(3, k).to("meta")
    yield "fake", FakeTensorMode().from_tensor(new(3, k))
    yield "coo", new(3, k).to_sparse()
    yield "csr", new(3, k).to_sparse_csr()
    yield "csc", new(3, k).to_sparse_csc()
    yield "bsr", new(4, k).to_sparse_bsr((2, 2))
    yield "bsc", new(4, k).to_sparse_bsc((2, 2))
    yield "mkldnn", new(3, k).to_mkldnn()
    yield "a list", [[1.0] * k]
    yield "None", None


def _nested(k: int, new: Callable[..., Tensor]) -> Iterator[tuple[str, Any]]:
    for layout in (torch.jagged, torch.strided):

        def nested(*parts: Tensor, layout: torch.layout = layout, **words: Any) -> Tensor:
            return torch.nested.nested_tensor(list(parts), layout=layout, **words)

        yield f"nested {layout}", nested(new(3, k), new(2, k))
        yield f"nested {layout} of equal parts", nested(new(3, k), new(3, k))
        yield f"nested {layout} of batches", nested(new(3, 2, k), new(2, 2, k))
        yield f"nested {layout} that requires grad", nested(new(3, k), new(2, k), requires_grad=True)
        yield f"nested {layout} without rows", nested(new(0, k), new(0, k))
        yield f"nested {layout} transposed", nested(new(3, k), new(2, k)).transpose(1, 2)
        yield f"nested {layout} of other features", nested(new(3, k + 1), new(2, k + 1))
        yield f"nested {layout} of float16", nested(new(3, k).half(), new(2, k).half())
    yield "nested without parts", torch.nested.nested_tensor([])


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its exception."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - every kind of error is compared
        return error


def difference(got: Any, expected: Any, *, values: bool = True, tolerance: Mapping[str, float] = TOLERANCE) -> str | None:
    """Return what differs between two outcomes, or None. An exception may be of a subclass of the expected one."""
    if isinstance(expected, Exception) or isinstance(got, Exception):
        same = isinstance(expected, Exception) and isinstance(got, type(expected))
        return None if same else f"got {got!r}, expected {expected!r}"
    if _look(got) != _look(expected):
        return f"got {_look(got)}, expected {_look(expected)}"
    pairs = zip(_numbers(got), _numbers(expected), strict=True) if values else ()
    return None if all(torch.allclose(x, y, **tolerance, equal_nan=True) for x, y in pairs) else f"got {got}, expected {expected}"


def _look(x: Tensor) -> tuple[Any, ...]:
    """Return what a caller can see of a tensor except its numbers."""
    look = (type(x), x.dtype, x.layout, x.device, x.requires_grad, x.is_inference(), x.is_nested)
    if x.is_nested:
        return (*look, *map(_look, x.unbind()))
    if x.layout is not torch.strided:
        return (*look, x.shape)
    stored = None if isinstance(x, (Wrapper, FakeTensor)) or x.is_meta else x.untyped_storage().nbytes()
    return (*look, x.shape, x.stride(), x.storage_offset(), stored)


def _numbers(x: Tensor) -> list[Tensor]:
    """Return the numbers of a tensor as dense tensors."""
    if x.is_nested:
        return [y for part in x.unbind() for y in _numbers(part)]
    if isinstance(x, FakeTensor) or x.is_meta:
        return []
    x = x.inner if isinstance(x, Wrapper) else x
    return [(x if x.layout is torch.strided else x.to_dense()).detach().as_subclass(Tensor)]
