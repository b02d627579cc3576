"""Keys of plans, which a call reads off its operands in about a microsecond."""

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
"""Default of ``epilogue_args``. Calls compare with it by identity, which works for wrong arguments too."""


def key_of(name: str, tensors: tuple[Any, ...], options: Hashable = None) -> Hashable | None:
    """Return everything that a plan depends on, or None for a call that needs the full checks.

    ``tensors`` are the tensors that the call reads, then ``out`` if there is one. ``name``, their number and ``options`` determine
    the role of each. ``options`` also holds all other arguments. Every call pays for this, and each attribute of a tensor costs 50
    to 100 ns, so it reads only what it needs.
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
        shape_a, shape_b = a.shape, t.shape
        key: tuple[Hashable, ...] = (
            shape_a, shape_b, _strides(a, shape_a), _strides(t, shape_b), dtype, t.dtype,
            (address_a & 15) << 4 | (address_b & 15), index, t.get_device(), token(torch_is_deterministic()), flags,
            name, packed, options, wants_grad,
        )  # fmt: skip
        for x in tensors[2:] if len(tensors) > 2 else NOTHING:
            # A plan cannot move a 0-D tensor from another device.
            if x.__class__ not in (Tensor, Parameter) or x.is_neg() or x.get_device() != index or not (address := x.data_ptr()):
                return None
            key += (shape := x.shape, _strides(x, shape), x.dtype, address & 15, x.requires_grad and torch.is_grad_enabled())
        return key
    except (AttributeError, RuntimeError):
        # No tensor, or one without memory, as in a torch.func transform. The checks handle it.
        return None


def _strides(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, with 0 for dimensions of size 1, whose stride no element depends on."""
    return x.stride() if 1 not in shape else tuple([0 if n == 1 else s for n, s in zip(shape, x.stride(), strict=True)])


def with_values(tensors: tuple[Any, ...], options: Hashable) -> tuple[tuple[Any, ...], Hashable]:
    """Return the tensors and options of the key for a product with a block-sparse weight: its values take its place."""
    a, b, *more = tensors
    packed = b.__class__ is PackedOperand
    weight: Tensor = b.tensor if packed else b
    return (a, weight.values(), *more), (options, weight.shape, packed)


_SHAPE_A, _NAME, _WANTS_GRAD, _FIRST = 0, 11, 14, 15
"""Places in a key: the shape of a, the operation, whether a gradient is wanted, and the shape of the third tensor."""
_FIRST_HAS_ROWS = ("addmm", "scaled_mm")
"""Operations whose third tensor can have a row for each row of a."""


def without_rows(key: Any) -> tuple[Hashable, int] | None:
    """Return the part of a key that is equal for every M of a weight, and M. Return None for a batch, a gradient, or M = 1.

    The part of a tensor whose rows follow M in another way still contains M.
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
