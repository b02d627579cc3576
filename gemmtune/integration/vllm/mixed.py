"""Layers of vLLM with weights of 4 or 8 bits and inputs of 16: GPTQ, AWQ and compressed-tensors checkpoints."""

from typing import Any, ClassVar, cast

import torch

from ..serving.mixed import parts, product, why_not
from .notes import note
from .points import Points

Tensor = torch.Tensor


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
        reason = why_not(c, cls.points)
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the parts of a layer's weight by those of ``mixed_mm``: numbers [N, K/2] or [N, K], scales and zeros [K/g, N]."""
        base = cast("Any", self)
        numbers, scales, zeros = parts(self.config, *base._get_weight_params(layer)[:3])
        base._transform_param(layer, self.w_q_name, lambda _: numbers)
        base._transform_param(layer, self.w_s_name, lambda _: scales)
        if self.config.zero_points:
            base._transform_param(layer, self.w_zp_name, lambda _: zeros)
        elif self.w_zp_name is not None:
            setattr(layer, self.w_zp_name, None)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ dequantized weight + bias."""
        q, s, z, *_ = cast("Any", self)._get_weight_params(layer)
        return product(str(self.config.weight_type), x, q, s, z, bias)
