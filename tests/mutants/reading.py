"""Mutants that read the wrong elements: strides, offsets, batches and addresses."""

from __future__ import annotations

import torch

from gemmtune.numerics.buffers import storage_bits
from gemmtune.problem import Layout

from .gemm import ALL_OPS, BATCHED, DENSE, Gemm

__all__ = [
    "address_rounded_down",
    "alignment_of_the_first_call",
    "batch_stride_ignored",
    "batches_in_turn_misread",
    "both_repeated_multiplied_once",
    "first_batch_only",
    "k_mask_off_by_one",
    "k_tail_unmasked",
    "last_row_clamped",
    "leading_dimension_rounded_down",
    "offsets_of_31_bits",
    "overlap_overwritten",
    "product_with_the_transpose_misread",
    "row_stride_ignored",
    "strided_vector_with_odd_k_misread",
    "strides_of_the_first_call",
    "subnormal_b_read_as_0",
    "tile_read_once_for_both",
    "transposed_b_misread",
    "wrong_for_two_transposed",
]

TILE = 16
VECTOR_BYTES = 16


def element_at(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the elements at these positions of the buffer of ``tensor``. A position outside wraps to the buffer's other end."""
    bits = storage_bits(tensor)
    return bits[positions % max(bits.numel(), 1)].view(tensor.dtype)


def read_at(tensor: torch.Tensor, stride: tuple[int, ...], size: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the tensor with these strides and size that begins at the first element of ``tensor``."""
    return element_at(tensor, _positions(tensor, stride, size or tuple(tensor.shape)))


def _positions(tensor: torch.Tensor, stride: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    total = torch.tensor(tensor.storage_offset(), device=tensor.device)
    for step, count in zip(stride, size, strict=True):
        total = total.unsqueeze(-1) + step * torch.arange(count, device=tensor.device)
    return total


def _from_rounded_address(x: torch.Tensor) -> torch.Tensor:
    first = int(x.storage_offset())
    skipped = x.data_ptr() % VECTOR_BYTES // x.element_size()
    return x.as_strided(x.shape, x.stride(), first - skipped) if 0 < skipped <= first else x


address_rounded_down = Gemm(gemm_traits=ALL_OPS, read=lambda a, b: (_from_rounded_address(a), _from_rounded_address(b)))
"""16-byte loads begin at the 16-byte boundary below an unaligned address."""


def _normal(b: torch.Tensor) -> torch.Tensor:
    return torch.where(b.abs() < torch.finfo(b.dtype).smallest_normal, 0.0, b.double()).to(b.dtype)


subnormal_b_read_as_0 = Gemm(
    gemm_traits=DENSE.changed({"dtypes": ("float16", "bfloat16"), "flush_subnormals": False}), read=lambda a, b: (a, _normal(b))
)
"""Undeclared flushing, of one operand only."""


def _rounded_down(x: torch.Tensor) -> torch.Tensor:
    unit = VECTOR_BYTES // x.element_size()
    rounded = x.stride(-2) // unit * unit
    return read_at(x, (*x.stride()[:-2], rounded, 1)) if x.stride(-1) == 1 and rounded >= unit else x


leading_dimension_rounded_down = Gemm(read=lambda a, b: (_rounded_down(a), b))
"""The leading dimension is passed in units of 16 bytes."""


def _without_gaps(x: torch.Tensor) -> torch.Tensor:
    rows, cols = x.shape[-2:]
    if x.stride(-1) == 1 and x.stride(-2) > cols:
        return read_at(x, (*x.stride()[:-2], cols, 1))
    if x.stride(-2) == 1 and x.stride(-1) > rows:
        return read_at(x, (*x.stride()[:-2], 1, rows))
    return x


row_stride_ignored = Gemm(gemm_traits=ALL_OPS, read=lambda a, b: (_without_gaps(a), b))
"""The row length of a is taken for its leading dimension."""


def _end_without_stride(b: torch.Tensor) -> torch.Tensor:
    k = b.shape[-2]
    if b.shape[-1] != 1 or b.stride(-2) == 1 or k < 2 or not k % 2:
        return b
    return torch.cat([b[..., :-1, :], b[..., -2:-1, :]], dim=-2)


strided_vector_with_odd_k_misread = Gemm(read=lambda a, b: (a, _end_without_stride(b)))
"""A vector with gaps is read two elements at a time. At the end of an odd K, the element before the last is read again."""


def _matrices_in_a_row(x: torch.Tensor) -> torch.Tensor:
    return read_at(x, (x.shape[-2] * x.shape[-1], *x.stride()[1:])) if x.dim() == 3 else x


batch_stride_ignored = Gemm(gemm_traits=BATCHED, read=lambda a, b: (a, _matrices_in_a_row(b)))
"""Each matrix of b is read from directly behind the previous one."""


def _batches_apart(x: torch.Tensor) -> torch.Tensor:
    in_turn = x.dim() == 3 and x.shape[0] > 1 and 0 < x.stride(0) < max(x.stride()[1:])
    return x[:1].expand_as(x) if in_turn else x


batches_in_turn_misread = Gemm(gemm_traits=BATCHED, read=lambda a, b: (_batches_apart(a), _batches_apart(b)))
"""A batch stride smaller than a matrix is taken for one matrix for the whole batch."""


def _once(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    repeated = a.dim() == 3 and a.shape[0] > 1 and a.stride(0) == b.stride(0) == 0
    return (torch.cat([a[:1], torch.zeros_like(a[1:])]) if repeated else a), b


both_repeated_multiplied_once = Gemm(read=_once)
"""Only the first product is computed if the whole batch has one matrix of a and one of b."""
first_batch_only = Gemm(gemm_traits=BATCHED, read=lambda a, b: (a, b[:1]))
"""The batch stride of b is taken for 0."""


def _overflowing(x: torch.Tensor) -> torch.Tensor:
    farthest = sum((count - 1) * step for count, step in zip(x.shape, x.stride(), strict=True) if count)
    if farthest < 2**31:
        return x
    first = int(x.storage_offset())
    offsets = _positions(x, x.stride(), tuple(x.shape)) - first
    return element_at(x, first + (offsets & (2**31 - 1)))


offsets_of_31_bits = Gemm(read=lambda a, b: (_overflowing(a), _overflowing(b)))
"""Offsets from the first element are truncated to 31 bits."""


class _FirstStrides:
    """Read step that reads operands of a known size with the strides of their first call."""

    def __init__(self) -> None:
        self._strides: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read("a", a, b), self._read("b", b, a)

    def _read(self, name: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        stride = self._strides.setdefault((name, x.dtype, tuple(x.shape), tuple(other.shape)), x.stride())
        return x if stride == x.stride() else read_at(x, stride)


class _FirstAlignment:
    """Read step that reads operands of known size and strides in 16-byte loads if their first call was aligned."""

    def __init__(self) -> None:
        self._aligned: dict[tuple[object, ...], bool] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read("a", a), self._read("b", b)

    def _read(self, name: str, x: torch.Tensor) -> torch.Tensor:
        key = (name, x.dtype, tuple(x.shape), x.stride())
        return _from_rounded_address(x) if self._aligned.setdefault(key, x.data_ptr() % VECTOR_BYTES == 0) else x


strides_of_the_first_call = Gemm(read=_FirstStrides())
"""A kernel that was bound to strides is looked up by sizes only."""
alignment_of_the_first_call = Gemm(read=_FirstAlignment())
"""A kernel that was chosen for aligned operands is looked up by sizes and strides only."""


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.data_ptr() == b.data_ptr() and a.dtype == b.dtype


def _first_operand_twice(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if _same_memory(a, b) and a.shape == b.shape and a.stride() != b.stride():
        return a, a
    return a, b


def _read_once(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not _same_memory(a, b):
        return a, b
    k = min(a.shape[-1], TILE)
    return a[..., :k], b[..., :k, :]


def _packed_in_place(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    apart = b.data_ptr() - a.data_ptr()
    if a.numel() and 0 < apart < Layout.of(a).span * a.element_size():
        b = b.clone()
        b.reshape(-1)[: min(8, b.numel())] = 0
    return a, b


product_with_the_transpose_misread = Gemm(read=_first_operand_twice)
"""mm(x, x.t()) is looked up by address in a table of packed operands, and is taken for mm(x, x)."""
tile_read_once_for_both = Gemm(gemm_traits=ALL_OPS, read=_read_once)
"""One copy serves both operands if their addresses are equal, which is right for the first tile only."""
overlap_overwritten = Gemm(gemm_traits=ALL_OPS, read=_packed_in_place)
"""The start of b is lost if it lies in the middle of a."""


def _transposed(x: torch.Tensor) -> bool:
    return x.stride(-2) == 1 and x.shape[-1] > 1 and x.stride(-1) >= x.shape[-2] > 1


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return read_at(x, (*x.stride()[:-2], x.shape[-1], 1)) if _transposed(x) else x


transposed_b_misread = Gemm(gemm_traits=ALL_OPS, read=lambda a, b: (a, _as_rows(b)))
"""A column-major b is read as row-major."""


def _one_block_early(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not (_transposed(a) and _transposed(b)):
        return a, b
    k = a.shape[-1] // TILE * TILE
    return a[..., :k], b[..., :k, :]


wrong_for_two_transposed = Gemm(read=_one_block_early)
"""The kernel for column-major a and b lacks its last loads. The other three kernels are right."""


def _past_k(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k = -(-a.shape[-1] // TILE) * TILE
    return read_at(a, a.stride(), (*a.shape[:-1], k)), read_at(b, b.stride(), (*b.shape[:-2], k, b.shape[-1]))


k_tail_unmasked = Gemm(read=_past_k)
"""If K is no multiple of the tile, memory behind the rows of a and the columns of b counts too."""


def _one_less(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k = a.shape[-1] - (a.shape[-1] % TILE > 0)
    return a[..., :k], b[..., :k, :]


k_mask_off_by_one = Gemm(gemm_traits=ALL_OPS, read=_one_less)
"""The last, incomplete block is masked by k < K − 1."""


def _clamped(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(a.shape[-2], device=a.device).clamp(max=max(0, a.shape[-2] - 2))
    return element_at(a, _positions(a, a.stride(), tuple(a.shape))[..., rows, :]), b


last_row_clamped = Gemm(gemm_traits=ALL_OPS, read=_clamped)
"""Row indices are clamped to M − 2."""
