"""Weights of layers that read the same input, laid next to each other in memory: one product can then do what several did."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import nn

from ..dispatch.weights import QuantizedWeight
from ..problem.layout import ALIGNED_BYTES
from .modules import is_linear

Tensor = torch.Tensor


@contextlib.contextmanager
def same_inputs(model: nn.Module) -> Iterator[list[list[nn.Module]]]:
    """Lists, for what runs in the block, of layers that were called one after the other with the same input.

    Compiled functions run uncompiled meanwhile.
    """
    found: list[list[nn.Module]] = []
    last: tuple[object, int] | None = None

    def noticed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal last
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor):
            return
        here = (x, 0 if x.is_inference() else x._version)
        if last is not None and last[0] is x and last[1] == here[1]:
            found[-1].append(module)
        else:
            found.append([module])
        last = here

    hooks = [m.register_forward_pre_hook(noticed, with_kwargs=True) for m in model.modules() if is_linear(m)]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def lay_out(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
    """Move the weights of each group of layers, and their biases, into one piece of memory each.

    Every Parameter stays the object that it is, with its values. What shares its memory with anything else stays where it is.
    """
    tensors = [*model.parameters(), *model.buffers()]
    owners = Counter(x.untyped_storage().data_ptr() for tensor in tensors for x in _parts(tensor) if x.layout is torch.strided)
    seen: set[nn.Module] = set()
    for group in groups:
        layers = [module for module in dict.fromkeys(group) if module not in seen]
        seen.update(layers)
        for name in ("weight", "bias"):
            held = [x for module in layers if (x := module._parameters.get(name)) is not None]
            movable = [x for x in dict.fromkeys(held) if all(_alone(part, owners) for part in _parts(x))]
            for kind, alike in groupby(movable, _kind):
                _move(list(alike) if kind is not None else [])


def _parts(x: Tensor) -> list[Tensor]:
    """The tensors with memory of their own that a tensor consists of."""
    if isinstance(x, QuantizedWeight):
        return [part for part in (x.tensor, x.scales, x.zero_points) if part is not None]
    return [x]


def _alone(x: Tensor, owners: Counter[int]) -> bool:
    """It is the whole of its memory, and that of nothing else in the model."""
    if x.layout is not torch.strided or x.is_meta or not x.numel():
        return False
    storage = x.untyped_storage()
    return storage.nbytes() == x.nbytes and owners[storage.data_ptr()] == 1


def _kind(x: Tensor) -> Hashable | None:
    """Equal for those that can be columns of one operand; None for what cannot be one."""
    if not isinstance(x, QuantizedWeight):
        plain = type(x) is nn.Parameter and x.is_contiguous()
        return (x.dtype, x.device, x.shape[1:], x.requires_grad) if plain else None
    n = x.shape[0]
    scales = [part for part in (x.scales, x.zero_points) if part is not None]
    columns = x.transposed and x.packed is None and x.tensor.t().is_contiguous()
    if not columns or any(part.shape[-1] != n or not part.is_contiguous() for part in scales):
        return None
    return (x.dtype, x.encoding, *((part.dtype, part.device, part.shape[0]) for part in (x.tensor, *scales)), len(scales))


def _move(alike: Sequence[Tensor]) -> None:
    """Make tensors of one kind rows, and the scales of weights columns, of one tensor; where each begins as aligned as before."""
    if len(alike) < 2 or any(part.nbytes % ALIGNED_BYTES for x in alike for part in _parts(x)):
        return
    ends = list(accumulate(x.shape[0] for x in alike))
    if not isinstance(alike[0], QuantizedWeight):
        whole = torch.cat([x.detach() for x in alike])
        for x, end in zip(alike, ends, strict=True):
            x.data = whole[end - x.shape[0] : end]
        return
    names = [name for name in ("tensor", "scales", "zero_points") if getattr(alike[0], name) is not None]
    for name in names:
        parts: list[Tensor] = [getattr(x, name) for x in alike]
        turned = name == "tensor"
        whole = torch.cat([part.t() for part in parts]).t() if turned else torch.cat(parts, 1)
        for x, end in zip(alike, ends, strict=True):
            setattr(x, name, whole[:, end - x.shape[0] : end])
