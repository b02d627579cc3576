"""Rules of torch's functions for a QuantizedWeight, which its ``__torch_dispatch__`` looks up here.

Every function takes one of seven ways:

1. It is a collective of torch.distributed: the parts move (``collectives``).
2. It has a rule in the tables below, which works on the parts.
3. It is made of other functions, and each of those takes its own way.
4. It would write into the weight: InvalidProblemError.
5. torch.distributed calls it: a rule of ``sharding`` works on the parts, otherwise InvalidProblemError.
6. It returns a view: the dequantized values of it, which can be read and refuse to be written (``views``).
7. It returns new memory: torch computes it with the dequantized weight.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ..dispatch.wholes import rewritten
from ..errors import InvalidProblemError
from ..operators.torch_products import torch_product
from .asker import asker, refuse
from .collectives import NAMESPACES, collective
from .parts import versions_of
from .products import combined_product, grouped_product, routed_product, stated_product
from .rounding import SCALE_DTYPES
from .sharding import sharded
from .views import check_unwritten, counting_versions_as, is_view_of, read_only

Tensor = torch.Tensor
aten = torch.ops.aten
QuantizedWeight = Any
"""The class, which hands itself over as ``cls``: its module is above this one."""


def performed(cls: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Do ``func``. Raises InvalidProblemError where it would write into a weight, other than by a rule."""
    for w in args:
        if isinstance(w, cls) and w.seen != (versions := versions_of(w.parts)):
            _notice(w, versions, args)
    with counting_versions_as(args[0]) if func.is_view else contextlib.nullcontext():
        if func.namespace in NAMESPACES:
            return collective(func, args, kwargs)
        result = _ruled(cls, func, args, kwargs)
        if result is not NotImplemented:
            return _aliasing(func, args, dict(kwargs), result) if func.is_view and isinstance(result, cls) else result
        if (composed := func.decompose(*args, **kwargs)) is not NotImplemented:
            return composed  # inference mode passes composite functions on undecomposed, such as .to(dtype)
        check_unwritten(cls, func, args, kwargs)
        if asker():
            return sharded(cls, func, args, kwargs)
        is_view = is_view_of(cls, func, args)
        plain_args, plain_kwargs = tree_map_only(cls, _laid_out if is_view else _plain, (args, dict(kwargs)))
        result = func(*plain_args, **plain_kwargs)
        return read_only(result) if is_view else result


def _notice(w: QuantizedWeight, versions: Sequence[int], args: Sequence[Any]) -> None:
    """Count a change of a part as one of the weight, for torch's check before a backward pass. Raise RuntimeError within one.

    A product that autograd follows has saved the weight already, and would take a new version for a later change.
    """
    if torch._C._current_graph_task_id() >= 0:
        raise RuntimeError(
            f"backward: got {w!r} with a part that changed in place, expected the weight of the forward pass; change it after the "
            "backward pass, or give the forward pass a clone() of it"
        )
    followed = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    if not followed and not w.is_inference():
        torch.autograd.graph.increment_version(w)
    w.seen = versions


def _ruled(cls: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result by a rule, or NotImplemented."""
    rule = _RULES.get(func) or _NAMED_RULES.get(func.name())
    if rule is not None:
        return rule(cls, *args, **kwargs)
    row = torch_product(func)
    return NotImplemented if row is None else stated_product(cls, row, row.stated(args, kwargs))


def _plain(w: QuantizedWeight) -> Any:
    return w.dequantize()


def _laid_out(w: QuantizedWeight) -> Tensor:
    """Return the dequantized values with the strides that the weight claims, which the arguments of a view refer to."""
    values: Tensor = w.dequantize()
    if values.stride() == w.stride():
        return values
    laid_out: Tensor = values.new_empty_strided(w.shape, w.stride()).copy_(values)
    return laid_out


def _same(_cls: Any, w: QuantizedWeight) -> Any:
    return w.map_parts(lambda part: _viewed_part(part, torch.Tensor.detach))


def _viewed_part(part: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a view of a part that counts versions with it. Below autograd torch would let the view count its own."""
    if type(part) is not Tensor or part.is_inference():
        return view(part)
    keys = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys):
        return view(part)


def _cloned(_cls: Any, w: QuantizedWeight, *, memory_format: object = None) -> Any:
    """Copy the weight. Where it is to be contiguous, the numbers of a row of it lie next to each other."""
    if memory_format is not torch.contiguous_format or w.is_contiguous():
        return w.map_parts(torch.clone)

    def clone(part: Tensor) -> Tensor:
        if part is not w.tensor:
            return part.clone()
        rows: Tensor = part.mT if w.transposed else part
        copied: Tensor = rows.clone(memory_format=torch.contiguous_format)
        return copied.mT if w.transposed else copied

    return w.map_parts(clone)


def _transposed(_cls: Any, w: QuantizedWeight, *dims: int) -> Any:
    if dims and {dim % w.dim() for dim in dims} != {w.dim() - 2, w.dim() - 1}:
        return NotImplemented
    return w.map_parts(lambda part: part, transposed=not w.transposed)


def _permuted(cls: Any, w: QuantizedWeight, dims: Sequence[int]) -> Any:
    if [dim % w.dim() for dim in dims] != ([1, 0] if w.dim() == 2 else [0, 2, 1]):
        return NotImplemented
    return _transposed(cls, w)


def _strided(cls: Any, w: QuantizedWeight, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Return the weight or its transpose, whichever has these strides: torch remakes a compiled graph's view by them."""
    asked = (tuple(size), tuple(stride))
    if offset in (None, 0):
        if asked == (w.shape, w.stride()):
            return _same(cls, w)
        if asked == (w.mT.shape, w.mT.stride()):
            return _transposed(cls, w)
    return NotImplemented


def _expert(_cls: Any, w: QuantizedWeight, dim: int, index: int) -> Any:
    """Return the weight of one expert, a view."""
    if w.dim() != 3 or dim % 3:
        return NotImplemented
    return w.map_parts(lambda part: _viewed_part(part, lambda x: x.select(0, index)))


def _chosen_experts(cls: Any, w: Any, indices: Sequence[Tensor | None]) -> Any:
    """Copy the weights of some experts, or of the one that a tensor names."""
    one = len(indices) == 1 and indices[0] is not None and indices[0].dim() <= 1 and indices[0].dtype in (torch.int32, torch.int64)
    return w.map_parts(lambda part: part[indices[0]]) if isinstance(w, cls) and w.dim() == 3 and one else NotImplemented


def _moved(_cls: Any, w: QuantizedWeight, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Copy the weight to another device, or dtype: numbers stay, scales that are not float32 follow the dtype."""
    if dtype not in (None, torch.float64, *SCALE_DTYPES):
        return NotImplemented
    non_blocking = bool(options.get("non_blocking"))

    def move(part: Tensor) -> Tensor:
        follows = dtype is not None and part.dtype in (torch.float16, torch.bfloat16)
        return part.to(device=device, dtype=dtype if follows else None, non_blocking=non_blocking, copy=True)

    return w.map_parts(move, dtype)


def _reshaped(_cls: Any, w: QuantizedWeight, size: Sequence[int]) -> Any:
    """Return the dequantized values in another shape: packed columns have no strides that a view could have."""
    if asker():
        return NotImplemented
    values: Tensor = w.dequantize().reshape(size)
    return values


def _viewed(cls: Any, w: QuantizedWeight, size: Sequence[int]) -> Any:
    values = _reshaped(cls, w, size)
    return values if values is NotImplemented else read_only(values)


def _recorded(_cls: Any, w: QuantizedWeight, stream: Any) -> None:
    w.map_parts(lambda part: part.record_stream(stream) or part)


def _overwritten(cls: Any, w: QuantizedWeight, source: Any, non_blocking: bool = False) -> Any:
    """Copy a weight of the same kind and shape into ``w``."""
    if not isinstance(w, cls):
        return NotImplemented
    if not isinstance(source, cls):
        if asker():
            refuse(aten.copy_.default, w)
        raise InvalidProblemError(
            f"copy_: got a tensor of {source.dtype} for {w!r}, expected a QuantizedWeight of the same kind; load floats before "
            "quantize_, and quantize then"
        )
    mine, theirs = ([getattr(x, name) for name in ("tensor", "scales", "zero_points")] for x in (w, source))
    kinds = [(x.shape, x.encoding, x.transposed, [None if p is None else (p.shape, p.dtype) for p in parts])
             for x, parts in ((w, mine), (source, theirs))]  # fmt: skip
    if kinds[0] != kinds[1]:
        raise InvalidProblemError(f"copy_: got {source!r}, expected one of the same kind as {w!r}")
    for part, other in zip(mine, theirs, strict=True):
        if part is not None:
            part.copy_(other, non_blocking)
            if not part.is_inference():
                torch.autograd.graph.increment_version(part)  # below autograd torch counts none
            rewritten(part)
    w.seen = versions_of(w.parts)  # torch itself counts this change
    return w


_aliasing: Callable[..., Any] = return_and_correct_aliasing
_RULES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift.default: _same,
    aten.lift_fresh.default: _same,
    aten.dequantize.self: lambda _, w: w.dequantize(torch.float32),  # as torch does
    aten.clone.default: _cloned,
    aten.t.default: _transposed,
    aten.transpose.int: _transposed,
    aten.permute.default: _permuted,
    aten.as_strided.default: _strided,
    aten.select.int: _expert,
    aten.index.Tensor: _chosen_experts,
    aten._to_copy.default: _moved,
    aten.copy_.default: _overwritten,
    aten._pin_memory.default: lambda _, w, device=None: w.map_parts(lambda part: part.pin_memory(device)),
    aten.is_pinned.default: lambda _, w, device=None: all(part.is_pinned(device) for part in w.parts),
    aten.record_stream.default: _recorded,
    aten._unsafe_view.default: _reshaped,
    aten.view.default: _viewed,
}
_NAMED_RULES: dict[str, Callable[..., Any]] = {
    "gemmtune::grouped_mm": grouped_product,
    "gemmtune::routed_grouped_mm": routed_product,
    "gemmtune::combined_grouped_mm": combined_product,
    "transformers::grouped_mm_fallback": grouped_product,  # of compiled models that are not in bfloat16
}
