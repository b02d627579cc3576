"""Layers of SGLang with weights of 4 or 8 bits and inputs of 16: GPTQ, AWQ and compressed-tensors checkpoints."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import InvalidProblemError
from ..formats import from_awq
from ..serving.mixed import parts, parts_of, product, why_not
from .linear import Hook
from .points import MIXED, Points

Tensor = torch.Tensor
KIND = "gemmtune_weight_type"
"""Attribute of a layer that we run, with the type of its weight."""
_NAMES = (("qweight", "scales", "qzeros"), ("weight_packed", "weight_scale", "weight_zero_point"))
"""Names of numbers, scales and zero points: of GPTQ and AWQ, and of compressed-tensors."""


def hooks(points: Points) -> Iterator[Hook]:
    """Yield hooks that run such layers by the table of ``mixed_mm``."""

    def apply(original: Any, method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        kind = getattr(layer, KIND, "")
        if kind:
            q, s, z = (getattr(layer, name) for name in _names(layer))
            return product(kind, x, q, s, z, bias)
        return original(method, layer, x, bias)  # type: ignore[no-any-return]

    yield from ((f"{target}.apply", apply) for target in MIXED if target in points.targets)


def convert(method: Any, layer: Any, points: Points) -> bool:
    """Lay a layer's weight out for ``mixed_mm`` if a table serves it. Return False if SGLang runs the layer."""
    names = _names(layer)
    held = getattr(layer, names[0], None)
    if getattr(held, "weight_loader", None) is _refuse:
        return True  # it was converted before, and nothing can have been loaded since
    setattr(layer, KIND, "")
    config = _config(method, layer) if held is not None and held.device.type == points.device_type else None
    if config is None or why_not(config, points):
        return False
    q, s, z = (getattr(layer, name, None) for name in names)
    kind = str(config.weight_type)
    awq = isinstance(config, SimpleNamespace)
    made = parts_of(kind, from_awq(q.data, z.data, s.data)) if awq else parts(config, q, s, z)  # type: ignore[union-attr]
    for name, part in zip(names, made, strict=True):
        parameter = None if part is None else torch.nn.Parameter(part, requires_grad=False)
        if parameter is not None:
            parameter.weight_loader = _refuse  # type: ignore[attr-defined]
        if hasattr(layer, name):
            delattr(layer, name)
        layer.register_parameter(name, parameter)
    setattr(layer, KIND, kind)
    return True


def _names(layer: Any) -> tuple[str, str, str]:
    return next((names for names in _NAMES if hasattr(layer, names[0])), _NAMES[0])


def _config(method: Any, layer: Any) -> Any:
    """Return SGLang's description of a layer, ours of an AWQ layer in the same words, or None if its weight is of another kind."""
    scheme = getattr(layer, "scheme", None)
    for holder in (method, scheme, getattr(scheme, "kernel", None)):
        if (found := getattr(holder, "kernel_config", None)) is not None:
            return found
    awq: Any = getattr(method, "quant_config", None)
    if getattr(awq, "weight_bits", None) != 4 or not getattr(awq, "zero_point", False):
        return None
    size, dtype = (layer.qweight.shape[0], layer.scales.shape[1]), layer.scales.dtype
    return SimpleNamespace(
        weight_type="uint4", group_size=awq.group_size, zero_points=True, act_type=dtype, partition_weight_shape=size
    )


def _refuse(*_: Any, **__: Any) -> None:
    """Raise InvalidProblemError instead of loading numbers in a checkpoint's layout into ours."""
    raise InvalidProblemError(
        "a weight of 4 or 8 bits was loaded again: got numbers in the checkpoint's layout, expected none, as gemmtune has laid the "
        "weight out for its kernels; start SGLang again, or with GEMMTUNE_SGLANG=0 if it is to load weights while it serves"
    )
