"""What a call can read off its operands in about a microsecond: the key under which its plan is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..problem.precision import flags_token
from ..settings import token
from .prepack import PackedOperand

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
torch_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
NOTHING: tuple[Tensor, ...] = ()
"""No ``epilogue_args``. A quick look compares with it by identity, which no wrong argument can make fail."""


def key_of(name: str, tensors: tuple[Any, ...], options: Hashable = None) -> Hashable | None:
    """Everything that a plan depends on; None for a call that must be looked at more closely.

    ``tensors`` are what the call reads, then ``out`` if there is one, which of them is which being told by ``name``, their number
    and ``options``, which is what else the caller asked for. Every call pays for this, and each attribute of a tensor costs 50 to
    100 ns: nothing is read that is not needed.
    """
    a, b = tensors[0], tensors[1]
    packed = b.__class__ is PackedOperand
    try:
        t: Tensor = b.tensor if packed else b
        if (a.__class__ is not Tensor and a.__class__ is not Parameter) or (
            t.__class__ is not Tensor and t.__class__ is not Parameter
        ):
            return None
        wants_grad = (a.requires_grad or t.requires_grad) and torch.is_grad_enabled()
        if a.is_neg() or t.is_neg() or forward_ad._current_level >= 0 or any_autocast():
            return None
        index, dtype = a.get_device(), a.dtype
        flags = None
        if index >= 0:
            if index != torch._C._cuda_getDevice():
                return None
            flags = flags_token(dtype)
        address_a, address_b = a.data_ptr(), t.data_ptr()
        if not (address_a and address_b) or (packed and wants_grad):
            return None
        key: tuple[Hashable, ...] = (
            a.shape, t.shape, a.stride(), t.stride(), dtype, t.dtype, (address_a & 15) << 4 | (address_b & 15), index,
            t.get_device(), token(torch_is_deterministic()), flags, name, packed, options, wants_grad,
        )  # fmt: skip
        for x in tensors[2:] if len(tensors) > 2 else NOTHING:
            # A scalar of another device is moved, which no plan does.
            if x.__class__ not in (Tensor, Parameter) or x.is_neg() or x.get_device() != index or not (address := x.data_ptr()):
                return None
            key += (x.shape, x.stride(), x.dtype, address & 15, x.requires_grad and torch.is_grad_enabled())
        return key
    except (AttributeError, RuntimeError):
        # No tensor at all, or one without memory of its own (a torch.func transform): the checks say what is wrong.
        return None


_SHAPE_A, _NAME, _WANTS_GRAD, _FIRST = 0, 11, 14, 15
"""Places in a key: the shape of a, the operation, whether a gradient is wanted, and the shape of the third tensor."""
_FIRST_HAS_ROWS = ("addmm", "scaled_mm")
"""Operations whose third tensor may have a row for each row of a."""


def without_rows(key: Any) -> tuple[Hashable, int] | None:
    """What of a key is the same for every M of a weight, and M; None where M is not the rows of a matrix alone, or 1.

    A tensor whose rows follow M in a way that is not known here keeps M in its part of the key.
    """
    shape = key[_SHAPE_A]
    if len(shape) != 2 or shape[0] < 2 or key[_WANTS_GRAD]:
        return None
    m = shape[0]
    if len(key) > _FIRST and key[_NAME] in _FIRST_HAS_ROWS:
        size = key[_FIRST]
        if len(size) == 2 and size[0] == m:
            return (shape[1], key[1:_FIRST], size[1], key[_FIRST + 1 :]), m
    return (shape[1], key[1:]), m
