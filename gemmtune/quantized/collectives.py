"""Collectives of torch.distributed with quantized weights, which move the bytes of all parts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .asker import STATE_DICTS, asker, refuse
from .pieces import joined, split
from .views import HasNoMemory

Tensor = torch.Tensor
aten = torch.ops.aten
QuantizedWeight = Any
"""The class: its module is above this one."""
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of collectives."""
_MOVING = ("broadcast_", "scatter_", "allgather_", "gather_")
"""Collectives that move whole tensors. Their first argument is written."""

_IDENTITIES = ("wait_tensor", "_wrap_tensor_autograd")
"""Functions that return their operand once it is there."""


class Flat(HasNoMemory):
    """Tensors in a row, each flattened, as torch.distributed keeps or broadcasts them. It refers to them and has no floats."""

    members: list[Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _instead = "give the tensors"

    def __new__(cls, members: list[Tensor]) -> "Flat":
        first, count = members[0], sum(x.numel() for x in members)
        self: Flat = Tensor._make_wrapper_subclass(cls, (count,), dtype=first.dtype, device=first.device)
        self.members = members
        return self

    @classmethod
    def joined(cls, tensors: Sequence[Tensor]) -> "Flat":
        """Return flat tensors and rows of them as one row."""
        return cls([member for x in tensors for member in (x.members if isinstance(x, cls) else [x])])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.namespace in NAMESPACES:
            return collective(func, args, kwargs or {})
        if func is aten.cat.default:
            return cls.joined(args[0])
        [row, *more] = args
        result: Any = None
        if func in (aten.detach.default, aten.alias.default):
            result = cls(row.members)
        elif func is aten.slice.Tensor:
            result = row._member(*more[1:])
        elif func is aten.view.default and len(row.members) == 1:
            result = row if list(more[0]) == [-1] else row.members[0].view(more[0])
        elif (composed := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
            result = composed
        return refuse(func, row) if result is None else result

    @property
    def parts(self) -> list[Tensor]:
        """The tensors in memory, those of weights among them."""
        return [part for member in self.members for part in _parts(member)]

    def _member(self, start: int, stop: int, step: int = 1) -> "Flat | None":
        """Return the member between two elements as a row."""
        before = 0
        for member in self.members:
            if (start, min(stop, len(self)), step) == (before, before + member.numel(), 1):
                return Flat([member])
            before += member.numel()
        return None

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        weight = next((x for x in self.members if isinstance(x, HasNoMemory)), None)
        return f"a flat tensor with {weight!r}"


def collective(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do a collective with quantized weights alone, or rows of them. Raise InvalidProblemError for one that computes."""
    name, tensors = func.overloadpacket.__name__, [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    if name in _IDENTITIES:
        return args[0]
    if name == "all_gather_into_tensor":
        return _all_gathered(func, *args)
    if name == "shard_dim_alltoall":
        return _other_shard(func, *args)
    if name not in _MOVING or not all(hasattr(x, "parts") for x in tensors) or asker() == STATE_DICTS:  # others receive floats
        return refuse(func, tensors[0])
    buffers = {x: _bytes(x) for x in tensors}
    if len({*map(len, buffers.values())}) > 1:
        return refuse(func, tensors[0])
    result = func(*_awaited(func, tree_map_only(Tensor, buffers.__getitem__, tuple(args))), **kwargs)
    work = result[-1] if isinstance(result, tuple) else result
    work.wait()
    for x in tree_leaves(args[0]):
        for part, numbers in zip(_parts(x), _numbers(buffers[x], _parts(x)), strict=True):
            part.copy_(numbers)
    return (args[0], work) if isinstance(result, tuple) else work


def _awaited(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``async_op`` true. NCCL returns a null Work otherwise, and waiting for that ends the process."""
    place = [argument.name for argument in func._schema.arguments].index("async_op")
    return (*args[:place], True, *args[place + 1 :]) if len(args) > place else args


def _all_gathered(func: Any, w: QuantizedWeight, count: int, group: Any, dim: int = 0) -> Any:
    """Return the weights of all ranks, next to each other along a dimension."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    gathered = torch.ops._c10d_functional.wait_tensor(gather(_bytes(w), count, group))
    weights = []
    for data in gathered.chunk(count):
        numbers = _numbers(data, w.parts)
        weights.append(w.map_parts(lambda _, numbers=numbers: next(numbers)))
    whole = joined(weights, dim)
    return refuse(func, w) if whole is None else whole


def _other_shard(func: Any, w: QuantizedWeight, gathered: int, sharded: int, name: Any) -> QuantizedWeight:
    """Return this rank's shard along another dimension: gather the weight, and keep a piece, as torch does on CPUs."""
    c10d: Any = torch.distributed.distributed_c10d
    group = c10d._resolve_process_group(name)
    whole, count = _all_gathered(func, w, group.size(), name, gathered), group.size()
    share = -(-whole.shape[sharded] // count)
    sizes = [max(min(share, whole.shape[sharded] - share * rank), 0) for rank in range(count)]
    pieces = split(whole, sharded, sizes)
    return refuse(func, w) if pieces is None else pieces[group.rank()].clone()


def _parts(x: Any) -> list[Tensor]:
    """Return the tensors in memory that a weight, a row or a plain tensor consists of."""
    parts: list[Tensor] = x.parts if isinstance(x, HasNoMemory) else [x]  # type: ignore[attr-defined]
    return parts


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of all parts in a row."""
    return torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in _parts(x)])


def _numbers(data: Tensor, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield tensors, shaped like the parts, with these bytes."""
    for part, own in zip(parts, torch.split(data, [part.nbytes for part in parts]), strict=True):
        yield own.clone().view(part.dtype).view(part.shape)
