"""The state of a quantized model as plain tensors, for file formats such as safetensors."""

import re
from collections.abc import Mapping
from typing import Literal

import torch

from ..problem.dtypes import dtype_name
from ..quantized.weight import QuantizedWeight

Tensor = torch.Tensor
_KINDS = ("int4", "uint4", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
PARTS = (*(f"{kind}_as_{dtype}{turn}" for kind in _KINDS for dtype in _DTYPES for turn in ("", "_t")), "scales", "zero_points")
"""Parts of a weight in a file. The name of the numbers has their encoding, the weight's dtype, and ``_t`` if it is transposed."""
_NUMBERS = re.compile(f"(.+)_({'|'.join(_KINDS)})_as_({'|'.join(_DTYPES)})(_t)?")


def flatten_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a ``state_dict`` of plain tensors, for example for safetensors. Each ``QuantizedWeight`` becomes its parts.

    The weight ``fc.weight`` becomes its numbers ``fc.weight_int4_as_bfloat16_t``, ``fc.weight_scales`` and
    ``fc.weight_zero_points``. ``unflatten_state_dict`` is the inverse.
    """
    plain: dict[str, Tensor] = {}
    for name, x in state.items():
        if isinstance(x, QuantizedWeight):
            numbers = f"{x.encoding or dtype_name(x.tensor.dtype)}_as_{dtype_name(x.dtype)}{'_t' * x.transposed}"
            parts = {numbers: x.tensor.mT if x.transposed else x.tensor, "scales": x.scales, "zero_points": x.zero_points}
            plain |= {f"{name}_{part}": tensor.detach().contiguous() for part, tensor in parts.items() if tensor is not None}
        else:
            plain[name] = x
    return plain


def unflatten_state_dict(plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ``state_dict`` from the plain tensors of ``flatten_state_dict``."""
    found = {match.string: match for match in map(_NUMBERS.fullmatch, plain) if match}
    parts = {f"{match[1]}_{part}" for match in found.values() for part in ("scales", "zero_points")}
    state: dict[str, Tensor] = {}
    for name, x in plain.items():
        if name in found:
            base, kind, dtype, transposed = found[name].groups()
            scales, zero_points = (plain.get(f"{base}_{part}") for part in ("scales", "zero_points"))
            encoding: Literal["", "int4", "uint4"] = kind if kind in ("int4", "uint4") else ""  # type: ignore[assignment]
            weight = QuantizedWeight(x.mT if transposed else x, scales, zero_points, encoding, dtype=getattr(torch, dtype))
            state[base] = weight.mT if transposed else weight
        elif name not in parts:
            state[name] = x
    return state
