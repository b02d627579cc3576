"""Layers of vLLM whose weights and inputs have 8 bits: int8, and float8 with scales of tensors, rows or blocks."""

from typing import Any, ClassVar, cast

import torch

from ...operators import library as library  # defines torch.ops.gemmtune
from ...problem.scales import SCALE_BLOCK
from ..serving.scaled import float8_product, int8_product, rounded_rows
from ..serving.tables import INVARIANT, all_layers, how_to_run_all, invariant, unserved_unmeasured
from .notes import note
from .points import Points

Tensor = torch.Tensor
LEAST_CAPABILITY = {"int8": 75, "fp8": 89}
"""Least compute capability of a GPU with such tensor cores, times ten."""


class _Kernel:
    """Answers that all kernels of 8-bit inputs share. A base class of vLLM stands beside each."""

    points: ClassVar[Points]
    kind: ClassVar[str]
    config: Any

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        note(self.points, f"{self.kind} {self.config}")

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return True if the device has products of such numbers, or False and the reason."""
        least = LEAST_CAPABILITY[cls.kind]
        if compute_capability is None and cls.points.device_type == "cuda":
            major, minor = torch.cuda.get_device_capability()
            compute_capability = 10 * major + minor
        if compute_capability is not None and compute_capability < least:
            return False, f"compute capability: got {compute_capability}, expected at least {least}"
        return True, None


class Int8Kernel(_Kernel):
    """Products of inputs that are rounded to int8 for each token or by one scale, by the table of ``int_mm``."""

    kind = "int8"

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return True if such layers are served, or False and the reason. vLLM does not say the shape of the weight here."""
        reason = INVARIANT if invariant(cls.points) else ""
        if not reason and not c.input_symmetric:
            reason = "inputs have zero points, expected symmetric ones"
        if not reason and not all_layers(cls.points):
            reason = (
                f"vLLM states no shape here, so no table can be looked up; {how_to_run_all(cls.points)} to run int8 layers anyway"
            )
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Give the layer a scale for each column, and one scale of the inputs if that is static."""
        w, s, i, zero, adjusted = self._names()
        weight, scale = getattr(layer, w), getattr(layer, s).data.flatten()
        if not self.config.is_channelwise and len(layer.logical_widths) > 1:
            widths = torch.tensor(layer.logical_widths, device=scale.device)
            scale = scale.repeat_interleave(widths)
        _replace(layer, w, weight.data)
        _replace(layer, s, scale.float().reshape(1, -1).expand(1, weight.shape[0]).contiguous())
        if self.config.is_static_input_scheme:
            _replace(layer, i, getattr(layer, i).data.max().float())
        else:
            setattr(layer, i, None)
        setattr(layer, zero, None)
        setattr(layer, adjusted, None)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of rounded inputs, scaled in float32 and rounded once."""
        w, s, i, *_ = self._names()
        weight = getattr(layer, w)
        numbers, scale = rounded_rows(x.reshape(-1, x.shape[-1]), getattr(layer, i))
        result = int8_product(numbers, weight.t(), scale, getattr(layer, s), bias, x.dtype)
        return result.view(*x.shape[:-1], weight.shape[0])

    def _names(self) -> tuple[str, str, str, str, str]:
        """Return the names of weight, its scale, the inputs' scale and zero point, and vLLM's correction for the latter."""
        return cast("tuple[str, str, str, str, str]", tuple(cast("Any", self).layer_param_names))


class _Float8(_Kernel):
    """Answers of both kinds of float8 kernels."""

    kind = "fp8"
    known = "tensor and tensor, row and column"
    """Words for the scales that the kernel takes."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return True if a table serves such a layer, or False and the reason."""
        scales, reason = cls._scales(c), INVARIANT if invariant(cls.points) else ""
        if not reason and not scales:
            reason = f"scales: got {c.activation_quant_key} inputs and {c.weight_quant_key} weights, expected one of {cls.known}"
        if not reason:
            n, k = c.weight_shape
            words = {"dtype": c.weight_quant_key.dtype, "out_dtype": c.out_dtype, "scales": scales}
            reason = unserved_unmeasured("scaled_mm", (n, k), words, cls.points)
        return not reason, reason or None

    @classmethod
    def _scales(cls, c: Any) -> str:
        """Return our name of the scales of a layer, or an empty text."""
        inputs, weights = c.activation_quant_key.scale.group_shape, c.weight_quant_key.scale.group_shape
        if inputs.is_per_tensor() and weights.is_per_tensor():
            return "tensor"
        return "row" if row_scales(c.activation_quant_key.scale, c.weight_quant_key.scale) else ""


class Float8Kernel(_Float8):
    """Products of float8 with scales of tensors or rows, by the table of ``scaled_mm``. vLLM rounds the inputs."""

    def apply_scaled_mm(
        self, *, A: Tensor, B: Tensor, out_dtype: torch.dtype, As: Tensor, Bs: Tensor, bias: Tensor | None, output_shape: list[int]
    ) -> Tensor:
        """Return (A · As) @ (B · Bs) + bias for B [K, N]."""
        one = self._scales(self.config) == "tensor"
        scale_a, scale_b = (As.reshape(()), Bs.reshape(())) if one else (As.reshape(-1, 1), Bs.reshape(1, -1))
        return float8_product(A, B, scale_a, scale_b, bias, out_dtype).view(*output_shape)


class BlockKernel(_Float8):
    """Products of float8 with scales of 1x128 blocks of the inputs and 128x128 of the weight. vLLM rounds the inputs."""

    known = "dynamic 1x128 and 128x128"

    @classmethod
    def _scales(cls, c: Any) -> str:
        return "block_128x128" if block_scales(c.activation_quant_key.scale, c.weight_quant_key.scale) else ""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Let vLLM prepare the weight, then lay its scales [N/128, K/128] out along N, as our kernels read them."""
        base = cast("Any", super())
        base.process_weights_after_loading(layer)
        name = cast("Any", self)._get_layer_params(layer).block_scale_attr
        _replace(layer, name, getattr(layer, name).data.t().contiguous().t())

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Return (A · As) @ (B · Bs)ᵀ for B [N, K]."""
        out_dtype = self.config.out_dtype
        return torch.ops.gemmtune.scaled_mm(A, B.t(), As, Bs.t(), out_dtype=out_dtype, may_tune=False)  # type: ignore[no-any-return]


def row_scales(inputs: Any, weights: Any) -> bool:
    """Return True for a scale for each row of the inputs and each column of the weight, in vLLM's descriptions of scales."""
    by_column = weights.group_shape.is_per_channel() or weights.group_shape.is_per_token()  # of weights [N, K] and [K, N]
    return bool(inputs.group_shape.is_per_token() and by_column)


def block_scales(inputs: Any, weights: Any) -> bool:
    """Return True for scales of 1x128 blocks of the inputs, computed for each batch, and of 128x128 of the weight."""
    sides = tuple(inputs.group_shape), tuple(weights.group_shape)
    return not inputs.static and sides == ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))


def _replace(layer: Any, name: str, data: Tensor) -> None:
    """Give the layer a Parameter in place of another one."""
    delattr(layer, name)
    layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
