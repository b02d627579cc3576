"""Weights of 4 or 8 bits with inputs of 16: GPTQ, AWQ and compressed-tensors checkpoints.

An engine describes a layer by ``weight_type``, ``group_size``, ``zero_points``, ``has_g_idx``, ``act_type`` and
``partition_weight_shape`` [K, N].
"""

from typing import Any, Literal

import torch

from ...errors import InvalidProblemError
from ...operand_kinds import Encoding
from ...operators import library as library  # defines torch.ops.gemmtune
from ...quantized.weight import QuantizedWeight
from ..formats import from_gptq
from .tables import INVARIANT, Engine, invariant, unserved_unmeasured

Tensor = torch.Tensor
SIGNS = {"uint4b8": 0x88, "uint8b128": 0x80}
"""Bits that turn numbers with an implied zero point into two's complement, which needs none."""
TYPES: dict[str, tuple[Literal[4, 8], Encoding]] = {"uint4": (4, "uint4"), "uint4b8": (4, "int4"), "uint8b128": (8, "")}
"""Bits and encoding of each weight type that we serve."""
GROUPS = (-1, 32, 64, 128)
"""Elements along K that share a scale; -1 means all."""


def why_not(c: Any, engine: Engine) -> str:
    """Return the reason why no table serves a layer, or an empty text if one does."""
    kind, group, zeros = str(c.weight_type), c.group_size, bool(c.zero_points)
    result = getattr(c, "out_type", None)
    checks = (
        (kind in TYPES, f"weight type: got {kind}, expected one of {', '.join(TYPES)}"),
        (zeros == (kind == "uint4"), f"zero points: got {zeros} for {kind}, expected {not zeros}"),
        (group in GROUPS, f"group size: got {group}, expected one of {GROUPS}"),
        (not getattr(c, "has_g_idx", False), "rows of a group are not adjacent (desc_act)"),
        (c.act_type in (torch.float16, torch.bfloat16), f"inputs: got {c.act_type}, expected float16 or bfloat16"),
        (result in (None, c.act_type), f"results: got {result}, expected {c.act_type}, the dtype of the inputs"),
        (not invariant(engine), INVARIANT),
    )
    reason = next((text for right, text in checks if not right), "")
    if not reason:
        k, n = c.partition_weight_shape
        reason = unserved_unmeasured("mixed_mm", (n, k), words_of(c), engine)
    return reason


def words_of(c: Any) -> dict[str, Any]:
    """Return the keywords of ``Problem.mixed_mm`` for an engine's description of a layer."""
    encoding = TYPES[str(c.weight_type)][1]
    kind: dict[str, Any] = {"encoding": encoding} if encoding else {"dtype_b": torch.int8}
    scales = "column" if c.group_size in (-1, c.partition_weight_shape[0]) else f"group_{c.group_size}"
    return {"dtype": c.act_type, **kind, "scales": scales} | ({"zeros": True} if c.zero_points else {})


def parts(c: Any, q: Any, s: Any, z: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``mixed_mm``'s parts: numbers [N, K/2] or [N, K], words along K as in GPTQ checkpoints, scales, zeros [K/g, N]."""
    bits = TYPES[str(c.weight_type)][0]
    # Lay all parts out as a GPTQ checkpoint has them.
    words = _along(q, 0)
    scales = s.data.t() if getattr(s, "output_dim", 1) == 0 else s.data
    zeros = None if not c.zero_points else _along(z, 1)
    weight = from_gptq(words.contiguous(), zeros, scales.contiguous(), bits=bits, zeros_less_one=False)
    return parts_of(str(c.weight_type), weight)


def parts_of(kind: str, weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the parts of ``mixed_mm`` of a weight [K, N]. Numbers with an implied zero point become signed."""
    assert weight.scales is not None
    numbers = weight.tensor.t().contiguous()
    if kind not in SIGNS:
        return numbers, weight.scales, weight.zero_points
    numbers = numbers ^ SIGNS[kind]
    return numbers if TYPES[kind][1] else numbers.view(torch.int8), weight.scales, None


def product(kind: str, x: Tensor, q: Tensor, s: Tensor, z: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x @ dequantized weight + bias for the parts of a weight of type ``kind``."""
    rows = x.reshape(-1, x.shape[-1])
    result = torch.ops.gemmtune.mixed_mm(rows, q.t(), s, z, encoding=TYPES[kind][1], may_tune=False)
    result = result if bias is None else result + bias
    return result.view(*x.shape[:-1], q.shape[0])  # type: ignore[no-any-return]


def _along(x: Any, expected: int) -> Tensor:
    """Return a packed part whose words lie along the dimension ``expected``.

    Its inputs are the other parameters' dimension 0. compressed-tensors has both transposed.
    """
    packed = getattr(x, "packed_dim", expected)
    inputs = getattr(x, "input_dim", None)
    if expected == 0 and inputs is not None and inputs != packed:
        raise InvalidProblemError(f"qweight: got words along dimension {packed}, expected {inputs}, the dimension of the inputs")
    data: Tensor = x.data
    return data if packed == expected else data.t().contiguous()
