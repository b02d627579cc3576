"""What torch's functions do with a QuantizedWeight: the rules that ``__torch_dispatch__`` finds here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import settings
from ..errors import InvalidProblemError
from ..problem.dtypes import FLOAT8
from ..problem.grouped_compositions import added_by_token, gated_columns
from ..problem.scales import SCALE_BLOCK
from .rounding import SCALE_DTYPES

Tensor = torch.Tensor
aten = torch.ops.aten
QuantizedWeight = Any
"""The class, which hands itself over as ``cls``: its module is above this one."""


def performed(cls: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Do ``func``: by its rule, or with the dequantized weight. Raises InvalidProblemError for what would change it in place."""
    with _kind_of(args[0]) if func.is_view else contextlib.nullcontext():
        return _performed(cls, func, args, kwargs)


def _performed(cls: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    rule = _RULES.get(func) or _NAMED_RULES.get(func.name())
    if rule is not None:
        result = rule(cls, *args, **kwargs)
        if result is not NotImplemented:
            return _aliasing(func, args, dict(kwargs), result) if func in _VIEWS else result
    if (composed := func.decompose(*args, **kwargs)) is not NotImplemented:
        return composed  # inference mode hands on whole what is made of others, such as .to(dtype)
    if func._schema.is_mutable and _changes_a_weight(cls, func, args, kwargs):
        raise InvalidProblemError(
            f"{func}: got a QuantizedWeight, expected a tensor that can be changed in place; dequantize() it first"
        )
    plain_args, plain_kwargs = tree_map_only(cls, lambda w: w.dequantize(), (args, dict(kwargs)))
    return func(*plain_args, **plain_kwargs)


def _changes_a_weight(cls: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a weight is among what ``func`` writes into, and not only among what it reads."""
    written = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    given = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return any(isinstance(x, cls) for x in tree_leaves([given.get(name) for name in written]))


def _kind_of(w: QuantizedWeight) -> contextlib.AbstractContextManager[Any]:
    """A view of a tensor that counts versions counts them too, in inference mode as well."""
    return torch.inference_mode(w.is_inference()) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _same(_cls: Any, w: QuantizedWeight) -> Any:
    return w.map_parts(lambda part: part.detach())


def _cloned(_cls: Any, w: QuantizedWeight, *, memory_format: object = None) -> Any:  # noqa: ARG001
    return w.map_parts(torch.clone)


def _turned(_cls: Any, w: QuantizedWeight, *dims: int) -> Any:
    if dims and {dim % w.dim() for dim in dims} != {w.dim() - 2, w.dim() - 1}:
        return NotImplemented
    return w.map_parts(lambda part: part, transposed=not w.transposed)


def _permuted(cls: Any, w: QuantizedWeight, dims: Sequence[int]) -> Any:
    if [dim % w.dim() for dim in dims] != ([1, 0] if w.dim() == 2 else [0, 2, 1]):
        return NotImplemented
    return _turned(cls, w)


def _expert(_cls: Any, w: QuantizedWeight, dim: int, index: int) -> Any:
    """The weight of one expert, a view."""
    return w.map_parts(lambda part: part.select(0, index)) if w.dim() == 3 and dim % 3 == 0 else NotImplemented


def _experts(cls: Any, w: Any, indices: Sequence[Tensor | None]) -> Any:
    """The weights of some experts, or of the one that a tensor names, copied."""
    one = len(indices) == 1 and indices[0] is not None and indices[0].dim() <= 1 and indices[0].dtype in (torch.int32, torch.int64)
    return w.map_parts(lambda part: part[indices[0]]) if isinstance(w, cls) and w.dim() == 3 and one else NotImplemented


def _moved(_cls: Any, w: QuantizedWeight, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """The weight elsewhere, or standing for another dtype: numbers stay, scales that are not float32 follow the dtype."""
    if dtype not in (None, torch.float64, *SCALE_DTYPES):
        return NotImplemented
    non_blocking = bool(options.get("non_blocking"))

    def move(part: Tensor) -> Tensor:
        follows = dtype is not None and part.dtype in (torch.float16, torch.bfloat16)
        return part.to(device=device, dtype=dtype if follows else None, non_blocking=non_blocking, copy=True)

    return w.map_parts(move, dtype)


def _viewed(_cls: Any, w: QuantizedWeight, size: Sequence[int]) -> Tensor:
    """The dequantized values in another shape: packed columns have no strides that a view could have."""
    values: Tensor = w.dequantize().reshape(size)
    return values


def _overwritten(cls: Any, w: QuantizedWeight, source: Any, non_blocking: bool = False) -> Any:
    """``copy_`` of a weight of the same kind and shape."""
    if not isinstance(w, cls):
        return NotImplemented
    if not isinstance(source, cls):
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
    return w


def _product(cls: Any, a: Any, w: Any) -> Any:
    """a @ w for a weight [K, N] on the right."""
    fits = isinstance(w, cls) and w.dim() == 2 and not isinstance(a, cls) and not w.transposed and a.dtype in SCALE_DTYPES
    if not fits:
        return NotImplemented
    if w.tensor.dtype in FLOAT8 and w.scales is not None and (block := _block(w)) is not None:
        numbers, scale = rows_in_float8(a, block)
        return _operator("scaled_mm", numbers, w.tensor, scale, w.scales.float(), out_dtype=a.dtype)
    scales, zeros = (x if x is None or x.dtype in (torch.float32, a.dtype) else x.float() for x in (w.scales, w.zero_points))
    return _operator("mixed_mm", a, w.tensor, scales, zeros, encoding=w.encoding)


def _grouped_product(
    cls: Any, a: Any, w: Any, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Any:
    """a @ w[g] for each group of rows."""
    fits = isinstance(w, cls) and w.dim() == 3 and not isinstance(a, cls) and not w.transposed and offs is not None and bias is None
    if not fits or a.dim() != 2 or a.dtype not in SCALE_DTYPES or out_dtype not in (None, a.dtype):
        return NotImplemented
    if w.tensor.dtype in FLOAT8:
        numbers, scale = rows_in_float8(a, a.shape[1])
        return _operator("scaled_grouped_mm", numbers, w.tensor, scale, w.scales.float(), offs, out_dtype=a.dtype)
    scales = w.scales if w.scales.dtype in (torch.float32, a.dtype) else w.scales.float()
    return _operator("mixed_grouped_mm", a, w.tensor, scales, offs, encoding=w.encoding)


def _routed_product(cls: Any, a: Any, w: Any, offs: Tensor, rows: Tensor | None = None, *, gated: str = "") -> Any:
    product = _grouped_product(cls, a if rows is None else a.index_select(0, rows), w, offs)
    return gated_columns(product, gated) if gated and product is not NotImplemented else product


def _combined_product(cls: Any, a: Any, w: Any, offs: Tensor, slots: Tensor, weights: Tensor) -> Any:
    product = _grouped_product(cls, a, w, offs)
    return product if product is NotImplemented else added_by_token(product, offs, slots, weights)


def _sum_and_product(cls: Any, inp: Any, a: Any, w: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(inp, cls) or (product := _product(cls, a, w)) is NotImplemented:
        return NotImplemented
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (inp if beta == 1 else inp * beta)


def _linear(cls: Any, x: Any, w: Any, bias: Tensor | None = None) -> Any:
    """A whole linear, which is what inference mode hands on."""
    if isinstance(x, cls) or not isinstance(w, cls) or w.dim() != 2 or not w.transposed:
        return NotImplemented
    product = _product(cls, x.reshape(-1, x.shape[-1]), w.t())
    if product is NotImplemented:
        return NotImplemented
    product = product.reshape(*x.shape[:-1], w.shape[0])
    return product if bias is None else product + bias


def _matmul(cls: Any, x: Any, w: Any) -> Any:
    if isinstance(x, cls) or not isinstance(w, cls) or x.dim() < 2:
        return NotImplemented
    product = _product(cls, x.reshape(-1, x.shape[-1]), w)
    return product if product is NotImplemented else product.reshape(*x.shape[:-1], w.shape[1])


def _block(w: QuantizedWeight) -> int | None:
    """Elements of a row of a that share a scale where w is multiplied by scaled_mm; None where only mixed_mm has its scales."""
    k, n = int(w.tensor.shape[0]), int(w.tensor.shape[1])
    shape = tuple(w.scales.shape) if w.scales is not None else ()
    if shape == (1, n):
        return k
    blocks = (-(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK))
    return SCALE_BLOCK if shape == blocks and w.scales is not None and w.scales.numel() > 1 else None


def rows_in_float8(a: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """a [M, K] as float8_e4m3fn with a scale for each ``block`` elements of a row: [M, ⌈K/block⌉], float32."""
    if a.is_cuda and not torch._C._len_torch_dispatch_stack():
        kernel = importlib.import_module("gemmtune.backends.triton.float8_rows")  # where there is CUDA there is Triton
        if kernel.serves(a):
            numbers, scales = kernel.round_rows(a, block)
            return numbers, scales
    m, k = a.shape
    whole = a if k % block == 0 else torch.nn.functional.pad(a, (0, -k % block))
    parts = whole.reshape(m, whole.shape[1] // block, block).float()
    scale = (parts.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (parts / scale[:, :, None]).to(torch.float8_e4m3fn)
    return numbers.flatten(1)[:, :k], scale


def _operator(name: str, *tensors: Tensor | None, **words: Any) -> Tensor:
    """The operator that torch knows: a node of a graph that is traced, else a launch. A weight of a model never tunes by itself."""
    importlib.import_module(
        "gemmtune.operators.library"
    )  # above this module; a weight may be loaded before anything of gemmtune is
    with settings.patch(tune="never"):
        result: Tensor = getattr(torch.ops.gemmtune, name)(*tensors, **words)
    return result


_aliasing: Callable[..., Any] = return_and_correct_aliasing
_VIEWS = (
    aten.detach.default, aten.alias.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.select.int,
)  # fmt: skip
_RULES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _cloned,
    aten.t.default: _turned,
    aten.transpose.int: _turned,
    aten.permute.default: _permuted,
    aten.select.int: _expert,
    aten.index.Tensor: _experts,
    aten._to_copy.default: _moved,
    aten.copy_.default: _overwritten,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.mm.default: _product,
    aten.addmm.default: _sum_and_product,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten._grouped_mm.default: _grouped_product,
}
_NAMED_RULES: dict[str, Callable[..., Any]] = {
    "gemmtune::grouped_mm": _grouped_product,
    "gemmtune::routed_grouped_mm": _routed_product,
    "gemmtune::combined_grouped_mm": _combined_product,
    "transformers::grouped_mm_fallback": _grouped_product,  # of compiled models that are not in bfloat16
}
