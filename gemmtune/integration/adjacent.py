"""Weights of layers with the same input, moved next to each other in memory so that one product can replace several."""

import contextlib
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ..problem.layout import ALIGNED_BYTES
from ..quantized.parts import in_place, versions_of
from ..quantized.weight import QuantizedWeight
from .modules import is_linear

log = logging.getLogger("gemmtune")
T = TypeVar("T")
_SHARED = "several modules have them, or a view, a state_dict, a graph of an earlier call or another process has their memory"
_TRIES = 4
"""Attempts to get consecutive blocks. Each failure uses up other free blocks that the allocator prefers."""
_BLOCK_BYTES, _SMALL_BYTES = 512, 2**20
"""Size of which each block of torch's allocator for a GPU is a multiple, and the largest block of a segment for small ones."""
_SHARE = 0.5
"""Largest share of a GPU's free memory that moves use up. Old weights may leave gaps in segments that torch cannot give back."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_placed: weakref.WeakKeyDictionary[nn.Module, "tuple[weakref.ref[nn.Module], ...]"] = weakref.WeakKeyDictionary()
"""Layers whose weights were put together, with the layers of that group in their order in memory."""


class Rows:
    """Allocator of adjacent tensors, each with a separate storage. On a GPU, one object has one memory pool for each device.

    A storage begins at its tensor's first element and has exactly the tensor's bytes, so that saving, sharding and the detection of
    tied weights see separate tensors.

    CPU: the storages are pieces of one allocation, which lives as long as any of them. torch refuses to resize such a storage
    (``untyped_storage().resize_``), like memory from numpy.
    CUDA: the storages are separate blocks of torch's allocator at consecutive addresses. Each can be freed, resized, shared with
    another process and recorded on a stream. Two blocks can be consecutive only if the first has a multiple of 512 bytes and the
    allocator takes both from one segment. It keeps separate segments for blocks of up to 1 MiB and for larger ones.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, torch.cuda.MemPool] = {}
        self._kept_free: dict[torch.device, float] = {}
        self.refused = 0
        """Groups for which a GPU has too little free memory."""

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Return adjacent copies of tensors of one device, inference tensors if the first is one.

        None if they would take more than half of a GPU's free memory, or if no blocks are consecutive.
        """
        with torch.inference_mode(tensors[0].is_inference()), torch.no_grad():
            pieces = self._pieces([x.nbytes for x in tensors], tensors[0].device)
            if pieces is None:
                return None
            for piece, x in zip(pieces, tensors, strict=True):
                piece.copy_(x.detach().reshape(-1).view(torch.uint8))
            return [piece.view(x.dtype).view(x.shape).data for piece, x in zip(pieces, tensors, strict=True)]

    def _pieces(self, sizes: Sequence[int], device: torch.device) -> list[Tensor] | None:
        if device.type == "cpu":
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            # DLPack's export of a slice begins at its first byte, and keeps the whole allocation alive.
            return [from_dlpack(piece) for piece in torch.split(memory, list(sizes))]
        padded = any(size % _BLOCK_BYTES for size in sizes[:-1])
        if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native" or padded:
            return None
        try:
            if self._fits(sum(sizes), device):
                return self._blocks(sizes, device)
        except torch.OutOfMemoryError as error:  # another process has the memory, or the program limits it
            log.debug("no memory to move weights: %s", error)
        self.refused += 1
        return None

    def _fits(self, size: int, device: torch.device) -> bool:
        """Return True if half of the memory that was free before the first move stays free."""
        if device not in self._kept_free:
            torch.cuda.synchronize(device)  # other streams may read the weights
            self._kept_free[device] = (1 - _SHARE) * torch.cuda.mem_get_info(device)[0]
        if torch.cuda.mem_get_info(device)[0] - size < self._kept_free[device]:
            self.give_back()
        return bool(torch.cuda.mem_get_info(device)[0] - size >= self._kept_free[device])

    def give_back(self) -> None:
        """Wait for moves to GPUs, then give the memory that torch's allocator keeps free back to them."""
        for device in self._pools:
            torch.cuda.synchronize(device)
        if self._pools:
            torch.cuda.empty_cache()

    def _blocks(self, sizes: Sequence[int], device: torch.device) -> list[Tensor] | None:
        """Free one block of all bytes, then allocate the pieces. The allocator splits the block from front to back."""
        held: list[list[Tensor]] = []
        with torch.cuda.device(device):
            pool = self._pools[device] = self._pools.get(device) or torch.cuda.MemPool()
            for _ in range(_TRIES):
                with torch.cuda.use_mem_pool(pool, device):
                    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                    del whole
                    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
                if are_consecutive(blocks):
                    return blocks
                held.append(blocks)
        return None


def adjacent_runs(items: Iterable[T], adjacent: Callable[[T, T], bool]) -> list[list[T]]:
    """Return the runs of two or more items each of which is adjacent to the next, in order."""
    runs: list[list[T]] = []
    for item in items:
        if runs and adjacent(runs[-1][-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return [run for run in runs if len(run) > 1]


def are_consecutive(tensors: Sequence[Tensor]) -> bool:
    """Return True if each of several contiguous tensors begins where the previous one ends."""
    return all(y.data_ptr() == x.data_ptr() + x.nbytes for x, y in pairwise(tensors))


def is_sole(x: Tensor) -> bool:
    """Return True if the tensor covers its storage, and no other tensor or process shares it.

    Other tensors may be views, entries of a ``state_dict``, or tensors that a graph keeps for its backward pass.
    """
    if x.layout is not torch.strided or x.is_meta or not x.numel():
        return False
    storage = x.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    alone = users == 2  # the tensor and ``storage``
    return alone and storage.nbytes() == x.nbytes and not (x.device.type == "cpu" and (storage.is_shared() or x.is_pinned()))


@contextlib.contextmanager
def same_inputs(model: nn.Module) -> Iterator[list[list[nn.Module]]]:
    """Yield groups of layers that the block, run uncompiled, calls in a row with the same input. The list fills up as it runs."""
    found: list[list[nn.Module]] = []
    last: tuple[object, int] | None = None

    def note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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

    hooks = [m.register_forward_pre_hook(note_call, with_kwargs=True) for m in model.modules() if is_linear(m)]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def alike_siblings(model: nn.Module) -> list[list[nn.Module]]:
    """Return groups of layers that may read one input: linear layers of one parent with equal inputs, in their order.

    They were not seen to run. Layers that have different inputs lie together in vain, and run as before. Left out are layers of
    containers, which run one after the other, experts, which few rows reach, and layers that were put together before.
    """
    found: list[list[nn.Module]] = []
    for name, parent in model.named_modules():
        if isinstance(parent, _CONTAINERS) or "experts" in name.split("."):
            continue
        alike: defaultdict[Hashable, list[nn.Module]] = defaultdict(list)
        for layer in parent.children():
            weight = layer._parameters.get("weight") if is_linear(layer) else None
            if weight is not None and (kind := _kind(weight)) is not None:
                # A dense layer's bias is part of its product. A quantized layer adds it behind.
                alike[kind, isinstance(weight, QuantizedWeight) or layer.bias is None].append(layer)
        found += [layers for layers in alike.values() if len(layers) > 1 and not any(map(_is_placed, layers))]
    return found


def _is_placed(layer: nn.Module) -> bool:
    """Return True if the layer was put together with others, and the weights of all of them still are."""
    group = [other() for other in _placed.get(layer, ())]
    weights = [None if other is None else other._parameters.get("weight") for other in group]
    numbers = [next(iter(_moved_parts(x).values())) for x in weights if x is not None and _kind(x) is not None]
    return 0 < len(numbers) == len(group) and are_consecutive(numbers)


def lay_out(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> bool:
    """Move the weights of each group of layers, and their biases, next to each other in memory. Return True if any moved.

    Each Parameter keeps its identity, its values and a separate storage. A Parameter does not move if several modules share it, if
    another tensor or process shares its memory, if the memory is pinned, or if there is no contiguous memory for the group.
    A group exists twice while it moves. On a CPU its memory is freed with the last of its weights.
    """
    holders = Counter(x for module in model.modules() for x in module._parameters.values() if x is not None)
    rows, stay, moved = Rows(), 0, False
    seen: set[nn.Module] = set()
    for group in groups:
        layers = [module for module in dict.fromkeys(group) if module not in seen]
        seen.update(layers)
        for name in ("weight", "bias"):
            held = [(x, y) for y in layers if (x := y._parameters.get(name)) is not None and _kind(x) is not None]
            free = [(x, y) for x, y in held if holders[x] == 1 and all(map(is_sole, _moved_parts(x).values()))]
            stay += len(held) - len(free) if len(held) > 1 else 0
            for _, alike in groupby(free, lambda pair: (_kind(pair[0]), _segments_of(pair[0]))):
                weights, owners = zip(*alike, strict=True)
                moved |= _move(weights, rows)
                if name == "weight" and len(owners) > 1:
                    together = tuple(map(weakref.ref, owners))
                    _placed.update((owner, together) for owner in owners)
    if moved:
        rows.give_back()
    if stay:
        log.info("optimize: %d weights and biases stay apart: %s", stay, _SHARED)
    if rows.refused:
        log.info("optimize: %d groups of weights stay apart: half of a GPU's free memory stays free", rows.refused)
    return moved


def _kind(x: Tensor) -> Hashable | None:
    """Return a key that is equal for tensors that can be columns of one operand, or None if the tensor cannot move."""
    if isinstance(x, QuantizedWeight):
        n, scales = x.shape[0], [part for part in (x.scales, x.zero_points) if part is not None]
        columns = x.transposed and x.packed is None and x.tensor.dim() == 2 and x.tensor.t().is_contiguous()
        if not columns or any(part.shape[-1] != n or not part.is_contiguous() for part in scales):
            return None
        parts = [(part.dtype, part.device, part.shape[0]) for part in (x.tensor, *scales)]
        key: Hashable = (x.dtype, x.encoding, *parts, len(scales))
    elif type(x) is nn.Parameter and x.layout is torch.strided and x.is_contiguous():
        key = (x.dtype, x.device, x.shape[1:], x.requires_grad)
    else:
        return None
    return None if any(part.nbytes % ALIGNED_BYTES for part in _moved_parts(x).values()) else key


def _segments_of(x: Tensor) -> tuple[bool, ...]:
    """Return True for each part of a Parameter that lies in a segment for small blocks on a GPU, which has no large ones."""
    return tuple(part.is_cuda and part.nbytes <= _SMALL_BYTES for part in _moved_parts(x).values())


def _moved_parts(x: Tensor) -> dict[str, Tensor]:
    """Return the parts of a Parameter that move, by attribute.

    Scales and zero points of groups along K do not move. Their columns cannot be both adjacent and separate storages.
    """
    if not isinstance(x, QuantizedWeight):
        return {"data": x}
    scales = {name: part for name in ("scales", "zero_points") if (part := getattr(x, name)) is not None and part.shape[0] == 1}
    return {"tensor": x.tensor, **scales}


def _move(alike: Sequence[Tensor], rows: Rows) -> bool:
    """Move tensors of one kind next to each other, with all their parts, and return True. Move none if a part finds no memory."""
    if len(alike) < 2:
        return False
    parts = [_moved_parts(x) for x in alike]
    before = {name: [each[name] for each in parts] for name in parts[0]}
    if all(map(are_consecutive, before.values())):
        return False
    moved: dict[str, list[Tensor]] = {}
    for name, columns in before.items():
        copies = rows.copies([x.t() if name == "tensor" else x for x in columns])
        if copies is None:
            return False
        moved[name] = copies
    for name, copies in moved.items():
        for x, copy in zip(alike, copies, strict=True):
            part = copy.t().data if name == "tensor" else copy
            setattr(x, name, in_place(part) if isinstance(x, QuantizedWeight) else part)
    for x in alike:
        if isinstance(x, QuantizedWeight):
            x.seen = versions_of(x.parts)  # equal numbers are no change
    return True
