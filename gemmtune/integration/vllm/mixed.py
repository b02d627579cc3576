"""Layers of vLLM with weights of 4 or 8 bits and inputs of 16: GPTQ, AWQ and compressed-tensors checkpoints."""

from typing import Any, ClassVar, Literal, cast

import torch

from ... import settings
from ...errors import InvalidProblemError
from ...operand_kinds import Encoding
from ...operators import library as library  # defines torch.ops.gemmtune
from ..formats import from_gptq
from .points import Points
from .tables import INVARIANT, invariant, note, unserved_quantized

Tensor = torch.Tensor
SIGNS = {"uint4b8": 0x88, "uint8b128": 0x80}
"""Bits that turn numbers with an implied zero point into two's complement, which needs none."""
TYPES: dict[str, tuple[Literal[4, 8], Encoding]] = {"uint4": (4, "uint4"), "uint4b8": (4, "int4"), "uint8b128": (8, "")}
"""Bits and encoding of each weight type of vLLM that we serve."""
GROUPS = (-1, 32, 64, 128)
"""Elements along K that share a scale; -1 means all."""


class MixedKernel:
    """Products of 16-bit inputs with such weights, by the table of ``mixed_mm``. vLLM's ``MPLinearKernel`` stands beside it."""

    points: ClassVar[Points]
    config: Any
    w_q_name: str
    w_s_name: str
    w_zp_name: str | None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        note(self.points, f"mixed_mm {self.config}")

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability of a GPU, times ten."""
        return 75

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return True if a table serves such a layer, or False and the reason."""
        kind, group, zeros = str(c.weight_type), c.group_size, bool(c.zero_points)
        result = getattr(c, "out_type", None)
        checks = (
            (kind in TYPES, f"weight type: got {kind}, expected one of {', '.join(TYPES)}"),
            (zeros == (kind == "uint4"), f"zero points: got {zeros} for {kind}, expected {not zeros}"),
            (group in GROUPS, f"group size: got {group}, expected one of {GROUPS}"),
            (not getattr(c, "has_g_idx", False), "rows of a group are not adjacent (desc_act)"),
            (c.act_type in (torch.float16, torch.bfloat16), f"inputs: got {c.act_type}, expected float16 or bfloat16"),
            (result in (None, c.act_type), f"results: got {result}, expected {c.act_type}, the dtype of the inputs"),
            (not invariant(cls.points), INVARIANT),
        )
        reason = next((text for right, text in checks if not right), "")
        if not reason:
            k, n = c.partition_weight_shape
            defaults = settings.current().vllm == "all"
            reason = unserved_quantized("mixed_mm", (n, k), words_of(c), cls.points, defaults=defaults)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the parts of a layer's weight by those of ``mixed_mm``: numbers [N, K/2] or [N, K], scales and zeros [K/g, N]."""
        kind, base = str(self.config.weight_type), cast("Any", self)
        q, s, z = base._get_weight_params(layer)
        bits, encoding = TYPES[kind]
        # Lay all parts out as a GPTQ checkpoint has them.
        words = _along(q, "packed_dim", 0)
        scales = s.data.t() if getattr(s, "output_dim", 1) == 0 else s.data
        zeros = None if not self.config.zero_points else _along(z, "packed_dim", 1)
        weight = from_gptq(words.contiguous(), zeros, scales.contiguous(), bits=bits, zeros_less_one=False)
        numbers = weight.tensor.t().contiguous()
        if kind in SIGNS:
            numbers = numbers ^ SIGNS[kind]
            numbers = numbers if encoding else numbers.view(torch.int8)
        base._transform_param(layer, self.w_q_name, lambda _: numbers)
        base._transform_param(layer, self.w_s_name, lambda _: scales.contiguous())
        if self.config.zero_points:
            base._transform_param(layer, self.w_zp_name, lambda _: weight.zero_points)
        elif self.w_zp_name is not None:
            setattr(layer, self.w_zp_name, None)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ dequantized weight + bias."""
        q, s, z = cast("Any", self)._get_weight_params(layer)
        encoding = TYPES[str(self.config.weight_type)][1]
        rows = x.reshape(-1, x.shape[-1])
        result = torch.ops.gemmtune.mixed_mm(rows, q.t(), s, z, encoding=encoding, may_tune=False)
        result = result if bias is None else result + bias
        return result.view(*x.shape[:-1], q.shape[0])  # type: ignore[no-any-return]


def words_of(c: Any) -> dict[str, Any]:
    """Return the keywords of ``Problem.mixed_mm`` for vLLM's description of a layer."""
    encoding = TYPES[str(c.weight_type)][1]
    kind: dict[str, Any] = {"encoding": encoding} if encoding else {"dtype_b": torch.int8}
    scales = "column" if c.group_size in (-1, c.partition_weight_shape[0]) else f"group_{c.group_size}"
    return {"dtype": c.act_type, **kind, "scales": scales} | ({"zeros": True} if c.zero_points else {})


def _along(x: Any, name: str, expected: int) -> Tensor:
    """Return a packed part whose words lie along the dimension ``expected``.

    Its inputs are the other parameters' dimension 0. compressed-tensors has both transposed.
    """
    packed = getattr(x, name, expected)
    inputs = getattr(x, "input_dim", None)
    if expected == 0 and inputs is not None and inputs != packed:
        raise InvalidProblemError(f"qweight: got words along dimension {packed}, expected {inputs}, the dimension of the inputs")
    data: Tensor = x.data
    return data if packed == expected else data.t().contiguous()
