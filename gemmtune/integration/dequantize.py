"""The way back from a quantized model to one of floats."""

from typing import Any, TypeVar

from torch import Tensor, nn

from ..errors import InvalidProblemError
from ..quantized.weight import QuantizedWeight
from .forwards import is_offloaded
from .modules import check_model

M = TypeVar("M", bound=nn.Module)


def dequantize_(model: M) -> M:
    """Give each quantized weight of a model its dequantized values as a Parameter without a gradient, in place. Return the model.

    Libraries that change weights, such as peft where it merges adapters, can change these. Shared Parameters stay shared.
    Raises InvalidProblemError, and changes nothing, if accelerate has offloaded one.
    """
    check_model("dequantize_", model)
    weights: list[tuple[str, nn.Module, str, Any]] = [
        (f"{place}.{name}".removeprefix("."), module, name, x)
        for place, module in model.named_modules()
        for name, x in module._parameters.items()
        if isinstance(x, QuantizedWeight)
    ]
    if gone := [whole for whole, module, _, x in weights if is_offloaded(module, x)]:
        raise InvalidProblemError(
            f"dequantize_: {gone[0]}: got a weight that accelerate has offloaded, expected one in memory; "
            "call accelerate.hooks.remove_hook_from_module(model, recurse=True) before"
        )
    made = dict[Tensor, nn.Parameter]()
    for _, module, name, x in weights:
        if x not in made:
            made[x] = nn.Parameter(x.dequantize().contiguous(), requires_grad=False)
        module._parameters[name] = made[x]
    return model
