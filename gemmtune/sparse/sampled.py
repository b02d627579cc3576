"""Sampled products: the blocks of a dense product that exist in a block-sparse matrix, by the fastest measured way.

There are three ways. The products of each are picked, proved and stored like all others:

===========  =====================================================================================================
``dense``    ``mm`` of the whole operands, then a selection of blocks. It copies no operands and suits many blocks.
``batched``  ``bmm`` of copies of the rows and columns of each block.
``grouped``  ``grouped_mm`` of copies of the columns of all blocks with the rows of each block row.
===========  =====================================================================================================
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .. import settings as settings_module
from ..bounded import Bounded
from ..device import detect
from ..dispatch.checks import check_operands, why_not_ours
from ..dispatch.host import host_us
from ..errors import InvalidProblemError
from ..numerics.block_sparse import assembled, by_blocks, parts, rows_of
from ..ops.grouped import grouped_mm
from ..ops.products import bmm, mm
from ..problem import Layout, Problem, precision_of
from ..problem.dtypes import DTYPES
from ..problem.operations import OPERATIONS
from ..problem.rules import MOST_GROUPS
from ..problem.sparsity import Sparsity
from ..selector.candidates import candidates_for
from ..selector.log import warn_if_busy
from ..selector.pick import pick
from ..selector.progress import Progress
from ..selector.select import select
from ..store.store import open_store
from .weights import sparsity_of

Tensor = torch.Tensor
MOST_GATHERED = 2**26
"""Maximum elements of operands that are copied at a time."""
SMALL_FLOPS = 2**24
"""Operations below which torch does the product, because the choice of a way hardly matters."""
FAR = 4.0
"""Expected slowdown against the best way from which a way is not measured."""
FLOPS_PER_US: Mapping[str, float] = {"cpu": 1e5, "cuda": 3e8}
BYTES_PER_US: Mapping[str, float] = {"cpu": 1e4, "cuda": 2e6}
"""Rough speeds of a device, for ways without a measurement and for the copies of operands."""
WHOLE_TILE = 64
"""Block side below which a product of blocks leaves some multipliers of the device idle."""
_ways = Bounded[object, str]()


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to compute a sampled product: ``times`` products of ``problem``, and the bytes that it copies."""

    problem: Problem
    times: int
    copied_bytes: int
    share: float = 1.0
    """Expected share of the device that such a product keeps busy."""

    @property
    def copies_us(self) -> float:
        """Expected time of the copies."""
        return self.copied_bytes / BYTES_PER_US[self.problem.device_type]

    @property
    def expected_us(self) -> float:
        """Expected time of the products and copies, without a measurement."""
        return self.times * self.problem.flops / (self.share * FLOPS_PER_US[self.problem.device_type]) + self.copies_us


def sampled_addmm_bsr(inp: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return the blocks of beta · inp + alpha · a @ b that exist in ``inp``.

    Args:
        inp: [M, N], a sparse_bsr tensor of float64, float32, float16 or bfloat16. With ``beta`` zero its numbers are not read.
        a, b: [M, K] and [K, N] of the dtype of ``inp``, any strides.

    Returns:
        A sparse_bsr tensor with the indices of ``inp``. ``a`` and ``b`` have gradients.

    Raises:
        InvalidProblemError: the operands do not fit together, their dtype is another one, or the indices are out of range,
            unsorted or repeated.
    """
    name = "sampled_addmm_bsr"
    check_operands(name, [("inp", inp), ("a", a), ("b", b)])
    sparsity = sparsity_of(name, inp)
    shapes = f"got inp {list(inp.shape)}, a {list(a.shape)} and b {list(b.shape)}"
    if a.dim() != 2 or b.dim() != 2 or (a.shape[0], *b.shape) != (inp.shape[0], a.shape[1], inp.shape[1]):
        raise InvalidProblemError(f"{name}: shapes do not fit, {shapes}; expected [M, N], [M, K] and [K, N]")
    if not inp.dtype == a.dtype == b.dtype or inp.dtype not in DTYPES:
        got = ", ".join(str(x.dtype) for x in (inp, a, b))
        raise InvalidProblemError(f"{name}: got dtypes {got}, expected one float dtype of 16 bits or more")
    values, crow, col = parts(inp)
    result = sampled_blocks(crow, col, a, b.t(), (sparsity.block_n, sparsity.block_k))
    result = result if alpha == 1 else result * alpha
    result = result if beta == 0 else result.add(values, alpha=beta)
    return assembled(crow, col, result, (inp.shape[0], inp.shape[1]))


def sampled_blocks(crow: Tensor, col: Tensor, g: Tensor, x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the blocks of g [M, T] @ x [K, T]ᵀ that exist: [blocks, block rows, block columns]."""
    block_m, block_k = block
    count, tokens = len(col), g.shape[1]
    if tokens == 0:
        return g.new_zeros(count, *block)
    if torch.is_grad_enabled() and (g.requires_grad or x.requires_grad):
        left, right = g.reshape(-1, block_m, tokens), x.reshape(-1, block_k, tokens)
        return torch.bmm(left.index_select(0, rows_of(crow)), right.index_select(0, col).mT)
    small = 2 * count * block_m * block_k * tokens < SMALL_FLOPS
    if small or why_not_ours([g, x], floats=True) is not None:
        return _by_blocks(crow, col, g, x, block, torch.bmm)
    way = _way_for(len(crow) - 1, count, g, x, block)
    if way == "dense":
        whole = by_blocks(mm(g, x.t()), Sparsity(block_n=block_m, block_k=block_k, density=1.0))
        return whole[rows_of(crow), col.long()]
    if way == "grouped":
        columns = x.reshape(-1, block_k, tokens).index_select(0, col).reshape(-1, tokens)
        ends = (crow[1:] * block_k).to(torch.int32)
        return grouped_mm(columns, _blocks_of(g, block_m).mT, ends).view(count, block_k, block_m).mT.contiguous()
    return _by_blocks(crow, col, g, x, block, bmm)


def _blocks_of(g: Tensor, block_m: int) -> Tensor:
    """Return g [M, T] as a view [block rows, block_m, T]."""
    return g.unflatten(0, (-1, block_m))  # type: ignore[no-untyped-call, no-any-return]


def _step(count: int, tokens: int, block: tuple[int, int]) -> int:
    """Return the number of blocks to multiply at a time."""
    most = max(MOST_GATHERED // max(sum(block) * tokens, 1), 1)
    return -(-count // max(-(-count // most), 1))


def _by_blocks(crow: Tensor, col: Tensor, g: Tensor, x: Tensor, block: tuple[int, int], product: Callable[..., Tensor]) -> Tensor:
    """Return the blocks by batched products of equal size. Blocks near the end may be computed twice."""
    rows, count, tokens = rows_of(crow), len(col), g.shape[1]
    left, right = g.reshape(-1, block[0], tokens), x.reshape(-1, block[1], tokens)
    out, step = g.new_empty(count, *block), _step(count, tokens, block)
    for begin in range(0, count, max(step, 1)):
        part = slice(min(begin, count - step), min(begin, count - step) + step)
        product(left.index_select(0, rows[part]), right.index_select(0, col[part]).mT, out=out[part])
    return out


def _way_for(block_rows: int, count: int, g: Tensor, x: Tensor, block: tuple[int, int]) -> str:
    """Return the name of the fastest way by the store's measurements. It is measured now if the settings allow it."""
    key = (block_rows, count, Layout.of(g), Layout.of(x), block, g.device, settings_module.current().token)
    found = _ways.get(key)
    if found is None:
        capturing = g.is_cuda and torch.cuda.is_current_stream_capturing()
        found = _fastest(_listed(block_rows, count, g, x, block), g.device, tunes=not capturing)
        if not capturing:
            _ways[key] = found
    return found


def _listed(block_rows: int, count: int, g: Tensor, x: Tensor, block: tuple[int, int]) -> dict[str, _Way]:
    """Return the ways for these operands, by name."""
    (block_m, block_k), (m, tokens), k, dtype = block, g.shape, x.shape[0], g.dtype
    words = {"device_type": g.device.type, "precision": precision_of(dtype, g.device.type)}

    def problem(op: str, a: Layout, b: Layout, size: tuple[int, ...], offs: Layout | None = None) -> Problem:
        return Problem(op=op, a=a, b=b, out=Layout.contiguous(size, dtype), offs=offs, **words)  # type: ignore[arg-type]

    step, item = _step(count, tokens, block), dtype.itemsize
    share = min(1.0, min(block) / WHOLE_TILE)
    rows, columns = Layout.contiguous((step, block_m, tokens), dtype), Layout.contiguous((step, block_k, tokens), dtype)
    result = 2 * count * block_m * block_k * item
    ways = {
        "dense": _Way(problem("mm", Layout.of(g), Layout.of(x.t()), (m, k)), 1, result),
        "batched": _Way(
            problem("bmm", rows, columns.transposed, (step, block_m, block_k)),
            -(-count // step),
            2 * count * sum(block) * tokens * item,
            share,
        ),
    }
    copied = 2 * count * block_k * tokens * item
    fits = copied <= 2 * MOST_GATHERED * item and block_rows <= MOST_GROUPS and count * block_k < 2**31
    if fits and dtype in OPERATIONS["grouped_mm"].operands[0].dtypes:
        a = Layout.contiguous((count * block_k, tokens), dtype)
        ends = Layout.contiguous((block_rows,), torch.int32)
        product = problem("grouped_mm", a, Layout.of(_blocks_of(g, block_m).mT), (count * block_k, block_m), ends)
        ways["grouped"] = _Way(product, 1, copied, share)
    return ways


def _fastest(ways: Mapping[str, _Way], device: torch.device, *, tunes: bool) -> str:
    least = min(way.expected_us for way in ways.values())
    near = {name: way for name, way in ways.items() if way.expected_us <= FAR * least}
    times = {name: _time_us(way, device, tunes=tunes) for name, way in near.items()} if len(near) > 1 else {}
    known = {name: time_us for name, time_us in times.items() if time_us is not None}
    if known:
        return min(known, key=known.__getitem__)
    return min(near, key=lambda name: near[name].expected_us)


def _time_us(way: _Way, device: torch.device, *, tunes: bool) -> float | None:
    """Return the time by the store's measurement of the product, or None without one. Tune it if the settings allow it."""
    settings, info = settings_module.current(), detect(device)
    candidates = candidates_for(way.problem, info, settings, host_us=host_us(info, settings))
    if not settings.tunes or not tunes:
        outcome = pick(list(candidates.stored_anyhow(open_store(settings)).known.values()))
    else:
        result = select(candidates, Progress())[1]
        warn_if_busy(result)
        outcome = result.picked
    return None if outcome is None or outcome.time_us is None else way.times * outcome.time_us + way.copies_us
