"""Mutants that write wrongly: outside of out, not everywhere, into inputs, into earlier results."""

from __future__ import annotations

import dataclasses

import torch

from gemmtune.numerics.buffers import distinct, storage_bits
from gemmtune.problem import Layout

from .gemm import ALL_OPS, DENSE, Gemm

__all__ = [
    "a_scaled_in_place",
    "another_stream",
    "bottom_rows_of_zeros",
    "c_returned_for_alpha_0",
    "columns_of_the_last_tile_unwritten",
    "columns_wrap_at_32768",
    "corner_unwritten",
    "fifth_row_past_a_tile_zero",
    "first_row_written_before_out",
    "gaps_of_out_ignored_for_beta_0",
    "last_row_written_twice",
    "nothing_written_without_terms",
    "one_buffer_for_all",
    "padding_of_out_overwritten",
    "result_found_by_address",
    "result_in_float32",
    "rows_past_65535_unwritten",
    "tiles_past_132_unwritten",
]

TILE = 16
REMAINDER = 5
WIDE_TILE, MULTIPROCESSORS = 128, 132
MOST_ROWS, MOST_COLUMNS = 2**16 - 1, 2**15
MOST_KNOWN = 64
"""Maximum number of kept results."""


def _beside(out: torch.Tensor, values: torch.Tensor, distance: int) -> None:
    """Write ``values`` into out's buffer, ``distance`` elements after out's first one, within the bounds of the buffer."""
    bits = storage_bits(out).view(out.dtype)
    begin = out.storage_offset() + distance
    kept = values.flatten()[max(0, -begin) : max(0, bits.numel() - begin)]
    bits[max(0, begin) : max(0, begin) + kept.numel()].copy_(kept)


def _past_the_end(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(acc)
    if out.numel() and out.shape[-2] % TILE:
        _beside(out, acc[..., -1:, :].reshape(-1)[-acc.shape[-1] :], Layout.of(out).span)
    return out


last_row_written_twice = Gemm(store=_past_the_end)
"""The store has no mask: if M is no multiple of the tile, it writes a row after the last one."""


def _before_out(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if out.numel() and out.data_ptr() % 16:
        _beside(out, acc.flatten()[:1], -1)
    return out.copy_(acc)


first_row_written_before_out = Gemm(store=_before_out)
"""The first store begins at the 16-byte boundary below an unaligned out."""


def _whole_rows(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    rows, cols = out.shape[-2:]
    gap = out.stride(-2) - cols
    if out.dim() == 2 and out.numel() and out.stride(-1) == 1 and gap > 0:
        between = out.as_strided((rows - 1, gap), (out.stride(0), 1), out.storage_offset() + cols)
        between.zero_()
    return out.copy_(acc)


padding_of_out_overwritten = Gemm(store=_whole_rows)
"""Rows are written up to the leading dimension, with zeros in the gaps."""


def _all_but_corner(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if out.numel() and out.shape[-2] % 2 and out.shape[-1] % 2:
        out[..., :-1, :].copy_(acc[..., :-1, :])
        out[..., -1, :-1].copy_(acc[..., -1, :-1])
        return out
    return out.copy_(acc)


corner_unwritten = Gemm(gemm_traits=ALL_OPS, store=_all_but_corner)
"""Elements are written in pairs, and an odd last one is dropped."""


def _whole_tiles_of_columns(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    cols = out.shape[-1] // TILE * TILE
    out[..., :cols].copy_(acc[..., :cols])
    return out


columns_of_the_last_tile_unwritten = Gemm(store=_whole_tiles_of_columns)
"""There are N / TILE programs, which is right only if N is a multiple of the tile."""


def _bottom_of_zeros(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(acc)
    out[..., out.shape[-2] // TILE * TILE :, :] = 0
    return out


bottom_rows_of_zeros = Gemm(gemm_traits=ALL_OPS, store=_bottom_of_zeros)
"""M / TILE programs write to a result of zeros. That is right only if M is a multiple of the tile."""


def _five_rows_behind(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(acc)
    if out.shape[-2] % TILE == REMAINDER and out.shape[-2] > TILE:
        out[..., -1, :] = 0
    return out


fifth_row_past_a_tile_zero = Gemm(store=_five_rows_behind)
"""The kernel for five remaining rows writes four of them. No other remainder is wrong."""


def _up_to_rows(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out[..., :MOST_ROWS, :].copy_(acc[..., :MOST_ROWS, :])
    return out


def _columns_wrapped(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(acc)
    if out.shape[-1] > MOST_COLUMNS:
        out[..., MOST_COLUMNS:] = out[..., : out.shape[-1] - MOST_COLUMNS].clone()
    return out


def _one_wave(acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    rows, cols = (-(-size // WIDE_TILE) for size in out.shape[-2:])
    left = rows * cols - MULTIPROCESSORS
    if min(rows, cols) == 1 or left <= 0:
        return out.copy_(acc)
    out[..., : (rows - 1) * WIDE_TILE, :].copy_(acc[..., : (rows - 1) * WIDE_TILE, :])
    return out


tiles_past_132_unwritten = Gemm(store=_one_wave)
"""Persistent blocks miss the last row of tiles if there are more tiles than multiprocessors."""
rows_past_65535_unwritten = Gemm(store=_up_to_rows)
"""One block for each row, limited by a CUDA grid's second dimension."""
columns_wrap_at_32768 = Gemm(store=_columns_wrapped)
"""Columns are counted in 15 bits."""
result_in_float32 = Gemm(
    gemm_traits=dataclasses.replace(DENSE, out=False, dtypes=("float16", "bfloat16")), store=lambda acc, out: acc.float()
)
"""The accumulator is returned without conversion."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScalesInput(Gemm):
    """A GEMM that multiplies its input a by alpha in place, for a kernel without alpha."""

    def _run(self, a: torch.Tensor, b: torch.Tensor, **others: object) -> torch.Tensor:
        alpha = others.pop("alpha", 1)
        if isinstance(alpha, float) and alpha != 1 and a.numel():
            distinct(a).mul_(alpha)
        return Gemm._run(self, a, b, **others)  # type: ignore[arg-type]


a_scaled_in_place = ScalesInput()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WritesNothing(Gemm):
    """A GEMM that launches nothing if K is 0, so that out keeps its old contents."""

    def _run(self, a: torch.Tensor, b: torch.Tensor, **others: object) -> torch.Tensor:
        out = others.get("out")
        if isinstance(out, torch.Tensor) and a.shape[-1] == 0:
            return out
        return Gemm._run(self, a, b, **others)  # type: ignore[arg-type]


nothing_written_without_terms = WritesNothing()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GapsIgnored(Gemm):
    """A GEMM whose kernel for beta 0 ignores the gaps between the rows of out."""

    def _run(self, a: torch.Tensor, b: torch.Tensor, **others: object) -> torch.Tensor:
        out, beta = others.get("out"), others.get("beta", 1)
        if not isinstance(out, torch.Tensor) or beta != 0 or out.is_contiguous():
            return Gemm._run(self, a, b, **others)  # type: ignore[arg-type]
        dense = torch.empty(out.shape).stride()
        Gemm._run(self, a, b, **(others | {"out": out.as_strided(out.shape, dense)}))  # type: ignore[arg-type]
        return out


gaps_of_out_ignored_for_beta_0 = GapsIgnored()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReturnsC(Gemm):
    """A GEMM that returns the added operand itself if alpha is 0 and beta is 1."""

    def _run(self, a: torch.Tensor, b: torch.Tensor, **others: object) -> torch.Tensor:
        c, size = others.get("inp"), (*a.shape[:-1], b.shape[-1])
        if isinstance(c, torch.Tensor) and c.shape == size and others.get("out") is None and others.get("alpha") == 0:
            return c if others.get("beta") == 1 else Gemm._run(self, a, b, **others)  # type: ignore[arg-type]
        return Gemm._run(self, a, b, **others)  # type: ignore[arg-type]


c_returned_for_alpha_0 = ReturnsC()


class _OneBuffer:
    """Store that gives results of one size and dtype the same memory."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def __call__(self, acc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._buffers.setdefault((tuple(out.shape), out.dtype, out.device), out).copy_(acc)


one_buffer_for_all = Gemm(gemm_traits=dataclasses.replace(DENSE, out=False, threads=False), store=_OneBuffer())
"""Each call overwrites the result of the previous one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundByAddress(Gemm):
    """A GEMM that computes a result once for each pair of addresses, sizes and strides."""

    known: dict[tuple[object, ...], torch.Tensor] = dataclasses.field(default_factory=dict, hash=False)

    def _run(self, a: torch.Tensor, b: torch.Tensor, **others: object) -> torch.Tensor:
        key = tuple((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (a, b))
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            found = self.known[key] = Gemm._run(self, a, b, **others).clone()  # type: ignore[arg-type]
        out = others.get("out")
        return out.copy_(found) if isinstance(out, torch.Tensor) else found.clone()


result_found_by_address = FoundByAddress(gemm_traits=dataclasses.replace(DENSE, ops=("mm", "bmm")))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OnAnotherStream(Gemm):
    """A GEMM that runs on another stream, without any synchronisation."""

    def _run(self, a: torch.Tensor, b: torch.Tensor, **others: object) -> torch.Tensor:
        if a.device.type != "cuda":
            return Gemm._run(self, a, b, **others)  # type: ignore[arg-type]
        with torch.cuda.stream(torch.cuda.Stream(a.device)):  # type: ignore[no-untyped-call]
            return Gemm._run(self, a, b, **others)  # type: ignore[arg-type]


another_stream = OnAnotherStream()
