"""Who calls a function of torch: torch.distributed, which shards the parts of a QuantizedWeight or is refused, or anybody else.

torch.distributed makes shards by functions that return floats to everybody else, such as ``chunk``, ``new_zeros`` and
``empty_like``. torch has no other extension point there.
"""

import sys
from types import FrameType
from typing import Any, NoReturn

from ..errors import InvalidProblemError

_TRANSPARENT = ("gemmtune.quantized.", "torch.")
"""Modules between a function and its caller, but for those below."""
_DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.distributed")
_CALLERS = (*_DISTRIBUTED, "torch.nn.modules.", "torch.autograd.")
_USERS = "torch.distributed.tensor._dispatch"
"""Module that calls a user's function on the local tensor of a DTensor."""
FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
STATE_DICTS = "torch.distributed._state_dict_utils"
_REMEDIES = {
    FULLY_SHARD: "fully_shard makes equal shards of dimension 0; leave this weight whole by ignored_params={weight}",
    "torch.distributed.fsdp": "shard by torch.distributed.fsdp.fully_shard, or leave this weight whole by ignored_states=[weight]",
    "torch.distributed.tensor": (
        "shard dimension 0 of a layer's weight, as ColwiseParallel does, or quantize in groups of 32 that each rank gets whole, or "
        "Replicate() this weight"
    ),
    STATE_DICTS: "load a whole or a sharded state_dict on each rank, without broadcast_from_rank0",
}
"""Advice by the module that asks, the most particular one first."""


def asker() -> str:
    """Return the name of the module of torch.distributed that calls the current function, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_CALLERS) or not name.startswith(_TRANSPARENT):
            return name if name.startswith(_DISTRIBUTED) and name != _USERS else ""
        frame = frame.f_back
    return ""


def refuse(func: Any, got: object) -> NoReturn:
    """Raise InvalidProblemError for a function that needs the floats of a weight."""
    name = asker()
    remedy = next((text for module, text in _REMEDIES.items() if name.startswith(module)), "give its parts, or dequantize() of it")
    raise InvalidProblemError(
        f"{func}: got {got!r} from {name or 'torch.distributed'}, expected a tensor with floats in memory; {remedy}"
    )
