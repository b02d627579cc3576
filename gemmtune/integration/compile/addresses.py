"""Addresses of a graph's inputs while it is compiled: the graph itself has tensors without memory in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch._guards import TracingContext
from torch.multiprocessing.reductions import StorageWeakRef

Tensor = torch.Tensor
Addresses = Mapping[StorageWeakRef, int]
"""Addresses of real storages, by the storages of the tensors in their place."""


def input_addresses() -> Addresses:
    """Return the addresses of all inputs of the graph that is being compiled; nothing where Dynamo did not trace it."""
    return {_storage(fake): real.untyped_storage().data_ptr() for real, fake in _inputs()}


def address_of(x: Tensor, known: Addresses) -> int | None:
    """Return the address of an input, or of a view of one, in a graph; None for anything else."""
    begin, offset = known.get(_storage(x)), x.storage_offset()
    return begin + offset * x.element_size() if begin is not None and isinstance(offset, int) else None


def neighbours() -> tuple[tuple[int, int], ...]:
    """Return the places of inputs that could be joined: the second begins in memory where the first ends.

    They depend on the machine's memory, and so does the compiled graph.
    """
    inputs = [real for real, _ in _inputs()]
    begins = {(x.data_ptr(), x.dtype): place for place, x in enumerate(inputs)}
    ends = [(place, begins.get((x.data_ptr() + x.nbytes, x.dtype))) for place, x in enumerate(inputs)]
    return tuple((place, next_) for place, next_ in ends if next_ is not None and _alike(inputs[place], inputs[next_]))


def _alike(x: Tensor, y: Tensor) -> bool:
    """Two tensors differ in the size of one dimension at most, as weights of one input do."""
    return x.dim() == y.dim() and sum(a != b for a, b in zip(x.shape, y.shape, strict=True)) <= 1


def _inputs() -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors that Dynamo found, in its order, with those that stand for them. Parts of a subclass are tensors of their own."""
    context = TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if context is None or mode is None:
        return
    for real in list(context.tensor_to_context):
        fake = mode.fake_tensor_converter._get_memo(real)
        if type(real) in (Tensor, torch.nn.Parameter) and real.layout is torch.strided and fake is not None:
            yield real, fake


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
