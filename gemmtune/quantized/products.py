"""Products with a QuantizedWeight: the rules by which torch's products become gemmtune's operators."""

from typing import Any, cast

import torch

from ..operators import library as _operators  # noqa: F401 - defines the operators
from ..operators.torch_products import Statement, TorchProduct
from ..passes import load, unwatched
from ..problem.dtypes import FLOAT8
from ..problem.grouped_compositions import added_by_token, gated_columns
from ..problem.scales import SCALE_BLOCK
from .rounding import SCALE_DTYPES

Tensor = torch.Tensor
QuantizedWeight = Any
"""The class, which hands itself over as ``cls``: its module is above this one."""


def product(cls: Any, a: Any, w: Any) -> Any:
    """Return a @ w for a weight [K, N] on the right, NotImplemented where no operator does it."""
    fits = isinstance(w, cls) and w.dim() == 2 and not isinstance(a, cls) and not w.transposed and a.dtype in SCALE_DTYPES
    if not fits or not _is_strided(a):
        return NotImplemented
    if w.tensor.dtype in FLOAT8 and w.scales is not None and (block := _block(w)) is not None:
        numbers, scale = rows_in_float8(a, block)
        return _operator("scaled_mm", numbers, w.tensor, scale, w.scales.float(), out_dtype=a.dtype)
    scales, zeros = _scales_for(a, w)
    return _operator("mixed_mm", a, w.tensor, scales, zeros, encoding=w.encoding)


def served_by_parts(x: Tensor, w: Any) -> bool:
    """Return True if ``linear_by_parts`` serves the input and the weight [N, K] of a layer."""
    is_plain = type(x) is Tensor and _is_strided(x) and x.dim() > 1 and x.dtype in SCALE_DTYPES
    is_inference = not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)
    return is_plain and is_inference and w.dim() == 2 and w.transposed and w.tensor.dtype not in FLOAT8


def linear_by_parts(x: Tensor, w: Any, bias: Tensor | None) -> Tensor:
    """Return x @ wᵀ + bias in a graph that reads w's parts: torch 2.11 takes subclasses apart at each call, at 5 µs a layer."""
    scales, zeros = _scales_for(x, w)
    result = _operator("mixed_mm", x.flatten(0, -2), w.tensor, scales, zeros, encoding=w.encoding)
    result = result.reshape(*x.shape[:-1], result.shape[1])
    return result if bias is None else result + bias


def _scales_for(a: Tensor, w: Any) -> tuple[Tensor | None, ...]:
    """Return scales and zero points of w in a dtype that mixed_mm takes beside a."""
    return tuple(x if x is None or x.dtype in (torch.float32, a.dtype) else x.float() for x in (w.scales, w.zero_points))


def grouped_product(cls: Any, a: Any, w: Any, offs: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Any:
    """Return a @ w[g] for each group of rows."""
    fits = isinstance(w, cls) and w.dim() == 3 and not isinstance(a, cls) and not w.transposed and offs is not None
    if not fits or a.dim() != 2 or a.dtype not in SCALE_DTYPES or out_dtype not in (None, a.dtype):
        return NotImplemented
    if w.tensor.dtype in FLOAT8:
        numbers, scale = rows_in_float8(a, a.shape[1])
        return _operator("scaled_grouped_mm", numbers, w.tensor, scale, w.scales.float(), offs, out_dtype=a.dtype)
    scales = w.scales if w.scales.dtype in (torch.float32, a.dtype) else w.scales.float()
    return _operator("mixed_grouped_mm", a, w.tensor, scales, offs, encoding=w.encoding)


def routed_product(cls: Any, a: Any, w: Any, offs: Tensor, rows: Tensor | None = None, *, gated: str = "") -> Any:
    """Return the grouped product of the chosen rows of a, gated where that is asked for."""
    result = grouped_product(cls, a if rows is None else a.index_select(0, rows), w, offs)
    return gated_columns(result, gated) if gated and result is not NotImplemented else result


def combined_product(cls: Any, a: Any, w: Any, offs: Tensor, slots: Tensor, weights: Tensor) -> Any:
    """Return the grouped product, summed up over the experts of each token."""
    result = grouped_product(cls, a, w, offs)
    return result if result is NotImplemented else added_by_token(result, offs, slots, weights)


def stated_product(cls: Any, row: TorchProduct, stated: Statement | str) -> Any:
    """Return a call of torch's product whose b is a weight, NotImplemented where no operator does it."""
    if isinstance(stated, str) or row.in_place or not isinstance(stated.operands["b"], cls):
        return NotImplemented
    a, w, inp = stated.operands["a"], stated.operands["b"], stated.operands.get("inp")
    if stated.op == "grouped_mm":
        return grouped_product(cls, a, w, stated.operands.get("offs"), out_dtype=stated.out_dtype)
    if stated.op not in ("mm", "addmm") or isinstance(a, cls) or isinstance(inp, cls) or w.dim() != 2:
        return NotImplemented
    if row.composite and (not _is_strided(a) or a.dim() == 0):
        return torch.nn.functional.linear(a, w.dequantize(), inp) if row.transposed else torch.matmul(a, w.dequantize())
    if row.composite and not row.transposed and a.dim() < 2:
        return NotImplemented
    # Inference mode passes composite products on undecomposed. ``reshape`` could not infer the number of rows without elements.
    rows = (a if a.dim() > 1 else a[None]).flatten(0, -2) if row.composite else a
    result = product(cls, rows, w.t() if row.transposed else w)
    if result is NotImplemented:
        return NotImplemented
    alpha, beta = (stated.numbers.get(name, 1) for name in ("alpha", "beta"))
    result = result.reshape(*a.shape[:-1], result.shape[1]) if row.composite else result
    result = result if alpha == 1 else result * alpha
    return result if inp is None or beta == 0 else result + (inp if beta == 1 else inp * beta)


def _is_strided(x: Tensor) -> bool:
    """Return False for nested tensors and other layouts, for which torch alone has products."""
    return x.layout is torch.strided and not x.is_nested


def _block(w: QuantizedWeight) -> int | None:
    """Return how many elements of a row of a share a scale in scaled_mm; None where only mixed_mm takes the scales of w."""
    k, n = int(w.tensor.shape[0]), int(w.tensor.shape[1])
    shape = tuple(w.scales.shape) if w.scales is not None else ()
    if shape == (1, n):
        return k
    blocks = (-(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK))
    return SCALE_BLOCK if shape == blocks and w.scales is not None and w.scales.numel() > 1 else None


def rows_in_float8(a: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round a [M, K] to float8_e4m3fn, with a scale for each ``block`` elements of a row: [M, ⌈K/block⌉], float32."""
    if unwatched(a) and (kernel := load("float8_rows")).serves(a):
        return cast("tuple[Tensor, Tensor]", kernel.round_rows(a, block))
    m, k = a.shape
    whole = a if k % block == 0 else torch.nn.functional.pad(a, (0, -k % block))
    parts = whole.reshape(m, whole.shape[1] // block, block).float()
    scale = (parts.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (parts / scale[:, :, None]).to(torch.float8_e4m3fn)
    return numbers.flatten(1)[:, :k], scale


def _operator(name: str, *tensors: Tensor | None, **words: Any) -> Tensor:
    """Call an operator of gemmtune: a node of a traced graph, else a launch. It never tunes for the weight of a model."""
    result: Tensor = getattr(torch.ops.gemmtune, name)(*tensors, may_tune=False, **words)
    return result
