"""Block-sparse weights of calls, checked and classified once, and again after a change of their indices in place."""

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from ..dispatch.freshness import Stamp
from ..errors import InvalidProblemError
from ..numerics.block_sparse import parts
from ..problem.sparsity import Sparsity, density_class, imbalance_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The class of a weight of a dtype, and the stamp of its checked indices. The stamp is None if nothing changes them."""

    indices: Stamp | None
    dtype: torch.dtype
    sparsity: Sparsity

    def holds(self, weight: torch.Tensor) -> bool:
        """Return True if neither the dtype nor the indices of the weight changed."""
        if self.dtype is not weight.dtype:
            return False
        return self.indices is None or self.indices.holds((weight.crow_indices(), weight.col_indices()))


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Known weights by identity, because another tensor can get the address of a weight that is gone."""


def sparsity_of(name: str, weight: object) -> Sparsity:
    """Return the class of a sparse_bsr weight. Its indices are read once, and again after a change.

    A change counts if it is made through the weight (``weight.col_indices()``). torch reports no changes that are made through the
    tensors that a weight was made of.

    Raises InvalidProblemError if ``weight`` is no sparse_bsr matrix, or its indices are out of range, unsorted or repeated.
    """
    if forward_ad._current_level >= 0:
        raise InvalidProblemError(
            f"{name}: forward-mode differentiation is active, which torch lacks for sparse_bsr tensors; give bsr.to_dense() to mm"
        )
    if is_grad_transformed():
        raise InvalidProblemError(
            f"{name}: a gradient transform of torch.func is active (grad, vjp, jacrev), which torch lacks for sparse_bsr tensors; "
            "call backward() or torch.autograd.grad, or give bsr.to_dense() to mm"
        )
    if isinstance(weight, torch.Tensor):
        known: _Known | None = _known.get(weight)  # type: ignore[no-untyped-call]
        if known is not None and known.holds(weight):
            return known.sparsity
    if not isinstance(weight, torch.Tensor) or weight.layout != torch.sparse_bsr:
        got = f"a tensor of layout {weight.layout}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InvalidProblemError(f"{name}: bsr must be a sparse_bsr tensor, got {got}; x.to_sparse_bsr((64, 64)) makes one")
    if weight.is_meta:
        raise InvalidProblemError(f"{name}: bsr is on the device meta, where its indices cannot be read; give it on cpu or cuda")
    if weight.dim() != 2 or weight.values().dim() != 3:
        raise InvalidProblemError(f"{name}: bsr must be a matrix of blocks, got shape {list(weight.shape)}; take one matrix")
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidProblemError(
            f"{name}: the indices of bsr are not known yet, and cannot be read while a CUDA graph is captured; call it once before"
        )
    if weight.values().dtype != weight.dtype:
        raise InvalidProblemError(
            f"{name}: got bsr of {weight.dtype} with values of {weight.values().dtype}, which torch makes of sparse_bsr weights of "
            "a module by half() or to(dtype); convert the dense module, and make its weights sparse then"
        )
    stamp = Stamp.of(parts(weight)[1:])
    found = _checked(name, weight)
    _known[weight] = _Known(indices=stamp, dtype=weight.dtype, sparsity=found)
    return found


def is_grad_transformed() -> bool:
    """Return True inside of ``torch.func.grad`` and the transforms that are made of it. The others multiply sparse tensors."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in levels)


def declare(weight: torch.Tensor, sparsity: Sparsity) -> None:
    """Record the class of a weight whose indices are right and never change, so that they are not read."""
    _known[weight] = _Known(indices=None, dtype=weight.dtype, sparsity=sparsity)


def changing_indices(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices of a weight that can change: none after ``declare``."""
    known: _Known | None = _known.get(weight)  # type: ignore[no-untyped-call]
    return () if known is not None and known.indices is None else parts(weight)[1:]


def _checked(name: str, weight: torch.Tensor) -> Sparsity:
    values, crow, col = parts(weight)
    count, block_n, block_k = values.shape
    rows, cols = weight.shape[0] // max(block_n, 1), weight.shape[1] // max(block_k, 1)
    # One copy to the host, which waits for the device.
    starts, places = crow.cpu().long(), col.cpu().long()
    if len(starts) != rows + 1 or len(places) != count:
        raise InvalidProblemError(
            f"{name}: got {len(starts)} row starts and {len(places)} column indices, expected {rows + 1} and {count}"
        )
    if int(starts[0]) != 0 or int(starts[-1]) != count or bool((starts.diff() < 0).any()):
        raise InvalidProblemError(f"{name}: crow_indices of bsr must rise from 0 to {count}, got {_shown(starts)}")
    outside = ((places < 0) | (places >= cols)).nonzero()
    if len(outside):
        where = int(outside[0])
        raise InvalidProblemError(f"{name}: col_indices[{where}] of bsr is {int(places[where])}, expected 0 to {cols - 1}")
    first_of_row = torch.zeros(count + 1, dtype=torch.bool, device="cpu")
    first_of_row[starts] = True
    wrong = ((places[1:] <= places[:-1]) & ~first_of_row[1:count]).nonzero()
    if len(wrong):
        where = int(wrong[0]) + 1
        row = int(torch.searchsorted(starts, where, right=True)) - 1
        raise InvalidProblemError(
            f"{name}: column indices of a block row must rise, but col_indices[{where}] = {int(places[where])} follows "
            f"{int(places[where - 1])} in block row {row} of bsr; sort the blocks and add up those that repeat"
        )
    return Sparsity(
        block_n=block_n,
        block_k=block_k,
        density=density_class(count / max(rows * cols, 1)),
        imbalance=imbalance_of(int(starts.diff().max()) if rows else 0, count, rows),
        wide_index=col.dtype == torch.int64,
    )


def _shown(x: torch.Tensor) -> str:
    listed = x.tolist()
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:4]))}, …, {', '.join(map(str, listed[-3:]))}]"
