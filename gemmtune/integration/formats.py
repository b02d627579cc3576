"""Conversions of quantized weights from and to AWQ and GPTQ checkpoints and torchao's tensors."""

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ..errors import InvalidProblemError
from ..problem.compositions import packed, unpacked
from ..problem.scales import BLOCKS_OF_WEIGHTS, block_of
from ..quantized.parts import size_of
from ..quantized.weight import QuantizedWeight

Tensor = torch.Tensor
Bits = Literal[4, 8]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each four bits of a word in AWQ's GEMM layout, the lowest bits first."""
_TORCHAO = ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "AffineQuantizedTensor")


def from_awq(qweight: Tensor, qzeros: Tensor | None, scales: Tensor) -> QuantizedWeight:
    """Return the weight [K, N] = (q − z) · s of AWQ's GEMM layout. The last group may have fewer rows.

    Args:
        qweight: int32 [K, N/8], eight columns in each word.
        qzeros: int32 [⌈K/g⌉, N/8], packed alike, or None for a zero point of 8.
        scales: [⌈K/g⌉, N].

    Raises:
        InvalidProblemError: the shapes of the parts do not fit, or a group has other than 32, 64 or 128 elements.
    """
    _check("from_awq", qweight, qzeros, scales)
    zeros = torch.full_like(scales, 8) if qzeros is None else _unpacked_words(qzeros, _AWQ_ORDER).to(scales.dtype)
    return QuantizedWeight(packed(_unpacked_words(qweight, _AWQ_ORDER)), scales, zeros, "uint4")


def to_awq(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Return qweight, qzeros and scales in AWQ's GEMM layout.

    Raises:
        InvalidProblemError: the weight is not uint4 or int4 in groups, or a zero point is not one of 0 … 15.
    """
    numbers, zeros, scales = _unsigned("to_awq", weight)
    return _packed_words(numbers, _AWQ_ORDER), _packed_words(zeros, _AWQ_ORDER), scales


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor | None,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: Bits = 4,
    zeros_less_one: bool = True,
) -> QuantizedWeight:
    """Return the weight [K, N] = (q − z) · s of a GPTQ checkpoint. The last group may have fewer rows.

    Args:
        qweight: int32 [⌈K·bits/32⌉, N], adjacent elements along K in each word.
        qzeros: int32 [⌈K/g⌉, ⌈N·bits/32⌉], adjacent columns in each word, or None for a zero point of 2^(bits − 1).
        scales: [⌈K/g⌉, N].
        g_idx: [K], the group of each row, if the checkpoint has it. Without it K is a multiple of 32/bits.
        zeros_less_one: the checkpoint stores z − 1, as every format except ``gptq_v2`` does.

    Raises:
        InvalidProblemError: bits other than 4 or 8, the shapes of the parts do not fit, a group has other than 32, 64 or 128
            elements, or the rows of a group are not adjacent (``desc_act``).
    """
    _check("from_gptq", qweight, qzeros, scales)
    if bits not in (4, 8):
        raise InvalidProblemError(f"from_gptq: bits: got {bits!r}, expected 4 or 8; dequantize the weight and quantize it again")
    order = tuple(range(32 // bits))
    numbers = _unpacked_words(qweight.t(), order).t()
    if g_idx is not None:
        numbers = _in_order(numbers, g_idx, scales.shape[0])
    if qzeros is None:
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        zeros = (_unpacked_words(qzeros, order)[:, : scales.shape[1]].to(torch.int32) + int(zeros_less_one)).to(scales.dtype)
    return QuantizedWeight(packed(numbers) if bits == 4 else numbers, scales, zeros, "uint4" if bits == 4 else "")


def _in_order(numbers: Tensor, g_idx: Tensor, groups: int) -> Tensor:
    """Return the rows of numbers that ``g_idx`` has, without those that fill the last word.

    Raises InvalidProblemError if the group of row k is not k // g, or ``g_idx`` has another number of rows.
    """
    rows = g_idx.shape[0]
    if not 0 <= numbers.shape[0] - rows < 8:
        raise InvalidProblemError(
            f"from_gptq: g_idx: got {rows} rows for a qweight of {numbers.shape[0]}, expected the same number; pass both parts of "
            "one layer"
        )
    block = block_of((groups, 1), (rows, 1), BLOCKS_OF_WEIGHTS)
    expected = torch.arange(rows, device=g_idx.device) // (block[0] if block else -(-rows // groups))
    if not torch.equal(g_idx.to(expected.dtype), expected):
        raise InvalidProblemError(
            "from_gptq: g_idx: got groups whose rows are not adjacent (desc_act), expected rows in order; dequantize the "
            "weight and quantize it again"
        )
    return numbers[:rows]


def to_gptq(weight: QuantizedWeight, *, zeros_less_one: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return qweight, qzeros, scales and g_idx of a GPTQ checkpoint.

    Raises:
        InvalidProblemError: the weight is not uint4 or int4 in groups, K is no multiple of 8, or a zero point is not one of
            0 … 15, with ``zeros_less_one`` 1 … 16.
    """
    numbers, zeros, scales = _unsigned("to_gptq", weight, int(zeros_less_one))
    (k, _), order = numbers.shape, tuple(range(8))
    if k % 8:
        raise InvalidProblemError(f"to_gptq: got K = {k}, expected a multiple of 8; pad the weight before it is quantized")
    g_idx = torch.arange(k, device=numbers.device) // _group_of(weight)
    return _packed_words(numbers.t(), order).t().contiguous(), _packed_words(zeros, order), scales, g_idx.to(torch.int32)


def from_torchao(tensor: Tensor) -> QuantizedWeight:
    """Return the weight [N, K] of torchao's Int4Tensor, Int8Tensor, IntxUnpackedToInt8Tensor or Float8Tensor, quantized by rows.

    The older AffineQuantizedTensor is supported with plain numbers and integer zero points. A rounding of inputs that torchao's
    tensor asks for is not part of the weight.

    Raises:
        InvalidProblemError: another type of tensor, weights of experts, blocks of several rows, or a scale for inputs
            (``act_pre_scale``).
    """
    kind, given = type(tensor).__name__, getattr(tensor, "__dict__", {})
    if given.get("act_pre_scale") is not None or (kind in _TORCHAO and tensor.dim() != 2):
        got = f"{list(tensor.shape)}{' with an act_pre_scale' if given.get('act_pre_scale') is not None else ''}"
        raise InvalidProblemError(
            f"from_torchao: got {kind} {got}, expected a weight [N, K] without one; dequantize() it, and quantize the result"
        )
    if kind == "Int4Tensor":
        scale, zero = given["scale"].float(), given["zero_point"].float()
        # torchao adds the zero point after scaling. We subtract it from the numbers before scaling.
        return QuantizedWeight(given["qdata"].t(), scale, -zero / scale, "int4", dtype=tensor.dtype).t()  # type: ignore[return-value]
    if kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"):
        return _by_rows(given["qdata"], given["scale"], given.get("zero_point"), tensor.dtype)
    if kind == "AffineQuantizedTensor":
        held, domain = given["tensor_impl"], getattr(given["zero_point_domain"], "name", "NONE")
        if type(held).__name__ != "PlainAQTTensorImpl" or domain == "FLOAT" or given["block_size"][0] != 1:
            raise InvalidProblemError(
                f"from_torchao: got an {kind} in {type(held).__name__} with zero points of domain {domain} and blocks "
                f"{given['block_size']}, expected PlainLayout, INT or NONE, and blocks of one row; dequantize() it, and quantize "
                "the result"
            )
        numbers, scale, zero = held.get_plain()
        return _by_rows(numbers, scale, zero, tensor.dtype)
    raise InvalidProblemError(
        f"from_torchao: got {kind}, expected an {', '.join(_TORCHAO[:-1])} or {_TORCHAO[-1]}; dequantize() it, and quantize the "
        "result"
    )


def _by_rows(numbers: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> QuantizedWeight:
    """Return the weight of numbers [N, K], with a scale and an optional zero point for each row or each group of a row."""
    rows = scale.shape[0] if scale.dim() else 1
    zeros = None if zero is None or not bool(zero.any()) else zero.reshape(rows, -1).t().to(scale.dtype)
    return QuantizedWeight(numbers.t(), scale.reshape(rows, -1).t(), zeros, dtype=dtype).t()  # type: ignore[return-value]


def to_torchao(weight: QuantizedWeight) -> Tensor:
    """Return a weight [N, K] of int4 in groups as torchao's Int4Tensor.

    Raises:
        InvalidProblemError: the weight is not int4 in groups, is [K, N], or its last group is smaller than the others.
        ImportError: torchao is not installed.
    """
    scales = _scales_of_groups(weight, ("int4",))
    if scales is None or not weight.transposed:
        raise InvalidProblemError(
            f"to_torchao: got {_shown(weight)}, expected a QuantizedWeight [N, K] of int4 in groups; pass .mT of a weight [K, N]"
        )
    int4: Any = importlib.import_module("torchao.quantization").Int4Tensor
    k, group = weight.shape[1], _group_of(weight)
    if k % group:
        raise InvalidProblemError(f"to_torchao: got {k} inputs in groups of {group}, expected a multiple; torchao has whole groups")
    zero = torch.zeros_like(scales) if weight.zero_points is None else -weight.zero_points * scales
    result: Tensor = int4(weight.tensor.t().contiguous(), scales.to(weight.dtype), zero.to(weight.dtype), [1, group], weight.shape)
    return result


def _check(name: str, qweight: Tensor, qzeros: Tensor | None, scales: Tensor) -> None:
    """Raise InvalidProblemError if the words are no matrices of int32, or scales and zero points differ in groups or columns."""
    for what, x in (("qweight", qweight), ("qzeros", qzeros)):
        if x is not None and (x.dtype != torch.int32 or x.dim() != 2):
            raise InvalidProblemError(f"{name}: {what}: got {x.dtype} of shape {list(x.shape)}, expected a matrix of int32")
    if scales.dim() != 2 or (qzeros is not None and scales.shape[0] != qzeros.shape[0]):
        others = "" if qzeros is None else f" and {qzeros.shape[0]} groups of qzeros"
        raise InvalidProblemError(
            f"{name}: got scales {list(scales.shape)}{others}, expected a matrix with as many rows as qzeros; pass both "
            "parts of one layer"
        )


def _unsigned(name: str, weight: QuantizedWeight, least: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers [K, N] of 0 … 15, integer zero points without ``least``, and scales. Those of int4 are increased by 8."""
    scales = _scales_of_groups(weight, ("int4", "uint4"))
    if scales is None or weight.tensor.shape[1] % 8:
        got = _shown(weight)
        raise InvalidProblemError(f"{name}: got {got}, expected a QuantizedWeight of uint4 or int4 in groups, N a multiple of 8")
    up = 8 if weight.encoding == "int4" else 0
    numbers = unpacked(weight.tensor, weight.encoding).to(torch.int32) + up
    zeros = torch.zeros_like(scales) if weight.zero_points is None else weight.zero_points
    words = zeros.to(torch.int32) + up - least
    wrong = (words - up + least != zeros) | (words < 0) | (words > 15)
    if bool(wrong.any()):
        remedy = "pass zeros_less_one=False (gptq_v2), or " if least else ""
        raise InvalidProblemError(
            f"{name}: got a zero point of {float(zeros[wrong][0] + up):g}, expected an integer of {least} … {15 + least}; {remedy}"
            "dequantize the weight and quantize it again"
        )
    return numbers, words, scales


def _group_of(weight: QuantizedWeight) -> int:
    """Return the elements along K that share a scale. The last group may have fewer."""
    assert weight.scales is not None
    block = block_of(tuple(weight.scales.shape), size_of(weight.tensor, weight.encoding), weight.blocks)
    assert block is not None
    return block[0]


def _scales_of_groups(weight: object, encodings: Sequence[str]) -> Tensor | None:
    """Return the scales of a weight that has one of these encodings in groups, or None for anything else."""
    if not isinstance(weight, QuantizedWeight) or weight.encoding not in encodings or weight.scales is None:
        return None
    return weight.scales if weight.scales.dim() == 2 else None


def _shown(weight: object) -> str:
    return repr(weight) if isinstance(weight, QuantizedWeight) else type(weight).__name__


def _unpacked_words(words: Tensor, order: Sequence[int]) -> Tensor:
    """Return int32 [R, C] as uint8 [R, C·len(order)]. The j-th lowest bits of a word are its column order[j]."""
    bits = 32 // len(order)
    columns: list[Tensor] = [words] * len(order)
    for place, column in enumerate(order):
        columns[column] = (words >> (bits * place)) & (2**bits - 1)
    return torch.stack(columns, -1).flatten(1).to(torch.uint8)


def _packed_words(numbers: Tensor, order: Sequence[int]) -> Tensor:
    """Return uint8 [R, C·len(order)] as int32 [R, C], the inverse of ``_unpacked_words``."""
    bits, wide = 32 // len(order), numbers.to(torch.int64).reshape(numbers.shape[0], -1, len(order))
    words = sum((wide[:, :, column] << (bits * place) for place, column in enumerate(order)), torch.zeros_like(wide[:, :, 0]))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
