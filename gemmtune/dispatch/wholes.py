"""Operands of several products of one input as one operand: without a copy if they are adjacent in memory, else a kept copy."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ..bounded import Bounded
from ..threads import in_a_thread
from ..toolchain.kept import is_ordered
from .freshness import Stamp, is_uncounted

Tensor = torch.Tensor
_wholes = Bounded[Hashable, Tensor]()
"""Tensors over the memory of adjacent pieces, which they do not keep alive. Each call compares the pieces' addresses first."""


@dataclass(slots=True, eq=False)
class _Gathered:
    """A kept copy of all columns of some pieces.

    ``captured`` means that CUDA graphs may read its memory, and ``stays`` that some of them are not Inductor's.
    """

    stamp: Stamp
    columns: Tensor
    captured: bool = False
    stays: bool = False


_Key = tuple[tuple[int, torch.Size, torch.dtype, int], ...]
_gathered: dict[_Key, _Gathered] = {}
"""Kept copies, by the address, shape, dtype and device of each piece."""
_containing: dict[int, list[tuple[_Gathered, int, int]]] = {}
"""The copies that contain a piece, by its address, and the piece's place and first column there."""


def whole(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose columns the pieces are, or None if they are not adjacent in memory."""
    first = pieces[0]
    stride, address, columns = first.stride(), first.data_ptr(), 0
    step = stride[-1] * first.element_size()
    for x in pieces:
        if x.data_ptr() != address + columns * step or x.stride()[-1] != stride[-1] or (x.shape[0] > 1 and x.stride() != stride):
            return None
        columns += x.shape[-1]
    key = (address, first.get_device(), first.dtype, first.shape, stride, columns)
    found = _wholes.get(key)
    if found is None:
        found = _wholes[key] = _over(first, columns)
    return found


def _over(first: Tensor, columns: int) -> Tensor:
    """Return a tensor of ``columns`` columns that begins with the first piece and extends past its storage."""
    size = (*first.shape[:-1], columns)
    span = 1 + sum((n - 1) * s for n, s in zip(size, first.stride(), strict=True))
    storage = torch._C._construct_storage_from_data_pointer(first.data_ptr(), first.device, span * first.element_size())
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, 0, size, first.stride())


def gathered(pieces: Sequence[Tensor]) -> Tensor:
    """Return the columns of all pieces as one tensor: a copy that is kept, and made again when ``freshness`` notices a change.

    A CUDA graph reads the memory of the copy, which then lasts until ``forget_gathered``. ``rewritten`` and ``replaced`` change it.
    """
    key = tuple((x.data_ptr(), x.shape, x.dtype, x.get_device()) for x in pieces)
    found, capturing = _gathered.get(key), pieces[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if found is not None and found.stamp.holds(pieces):
        if capturing:
            stream = torch.cuda.current_stream(pieces[0].device)
            found.captured, found.stays = True, found.stays or not is_ordered(stream.cuda_stream, pieces[0].get_device())
        return found.columns
    if capturing or any(x.requires_grad or is_uncounted(x) for x in pieces):
        return torch.cat(tuple(pieces), -1)
    if pieces[0].is_cuda:
        torch.cuda.current_stream(pieces[0].device).synchronize()
    return in_a_thread(lambda: _kept(key, found, pieces)).columns


def _kept(key: _Key, found: _Gathered | None, pieces: Sequence[Tensor]) -> _Gathered:
    """Keep a new copy, in the memory of an old one if there is one. The calling thread may allocate from a CUDA graph's pool."""
    stamp = Stamp.of(pieces)
    with torch.no_grad():
        if found is None:
            found = _gathered[key] = _Gathered(stamp, torch.cat(tuple(pieces), -1))
            begin = 0
            for place, x in enumerate(pieces):
                _containing.setdefault(x.data_ptr(), []).append((found, place, begin))
                begin += x.shape[-1]
            weakref.finalize(pieces[0], _drop, key, found).atexit = False
        else:
            torch.cat(tuple(pieces), -1, out=found.columns)
            found.stamp = stamp
        if pieces[0].is_cuda:
            torch.cuda.current_stream(pieces[0].device).synchronize()
    return found


def _drop(key: _Key, copy: _Gathered) -> None:
    """Drop the copy of pieces that are gone, unless a CUDA graph may read it once other pieces have their addresses."""
    if not copy.captured and _gathered.get(key) is copy:
        _remove(key, copy)


def _remove(key: _Key, copy: _Gathered) -> None:
    del _gathered[key]
    for address, *_ in key:
        left = [place for place in _containing.pop(address, ()) if place[0] is not copy]
        if left:
            _containing[address] = left


def forget_gathered() -> None:
    """Drop all copies but those that graphs of the program's own read. Inductor's graphs must be gone."""
    for key, copy in list(_gathered.items()):
        if not copy.stays:
            _remove(key, copy)


def rewritten(piece: Tensor) -> None:
    """Copy a piece that was written to into the copies that contain it and that CUDA graphs read."""
    for copy, part, begin in _containing.get(piece.data_ptr(), ()) if _containing and _is_plain(piece) else ():
        columns = copy.columns[..., begin : begin + piece.shape[-1]]
        alike = copy.stamp.parts[part].size == piece.shape and (columns.dtype, columns.device) == (piece.dtype, piece.device)
        if copy.captured and alike:
            with torch.no_grad():
                columns.copy_(piece)


def replaced(piece: Tensor) -> None:
    """Do as ``rewritten`` for a new piece at the address of an old one, where CUDA graphs take it for the old one."""
    if _containing and _is_plain(piece):
        storage = piece.untyped_storage()._cdata
        if any(copy.stamp.parts[part].storage.cdata != storage for copy, part, _ in _containing.get(piece.data_ptr(), ())):
            rewritten(piece)


def _is_plain(piece: Tensor) -> bool:
    """Return True for a tensor with an address: not a fake one, and no wrapper of a transform."""
    return type(piece) is Tensor and not piece.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(piece)
