"""The forward that an object of a layer has in place of its class's: in ``forward``, or behind a hook of accelerate."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

_HOOK, _BEHIND_HOOK = "_hf_hook", "_old_forward"
"""Attributes of a module with a hook of accelerate, which moves weights, for instance. The hook calls the second one."""


def place_of(module: nn.Module) -> str:
    """Return the attribute of the object that has its forward. A hook of accelerate takes the first one, and calls the second."""
    return _BEHIND_HOOK if _HOOK in module.__dict__ and _BEHIND_HOOK in module.__dict__ else "forward"


def is_offloaded(module: nn.Module, weight: Tensor) -> bool:
    """Return True for a weight that a hook of accelerate brings to each call. Its numbers are not here in between."""
    return _HOOK in module.__dict__ and weight.is_meta


def own_forward(module: nn.Module) -> Any:
    """Return the forward in the object, or None if it has that of its class."""
    return module.__dict__.get(place_of(module))


def is_its_class(module: nn.Module) -> bool:
    """Return True if the object has the forward of its class, as behind a hook, or as what pickle made of an optimized layer."""
    forward = own_forward(module)
    return isinstance(forward, MethodType) and forward.__func__ is getattr(type(module), "forward", None)


def give(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give the object a forward, as a method."""
    put_back(module, MethodType(forward, module))


def put_back(module: nn.Module, forward: Any) -> None:
    """Give the object the forward that ``own_forward`` returned before, None for that of its class."""
    place = place_of(module)
    if forward is not None:
        module.__dict__[place] = forward
    elif place == _BEHIND_HOOK:
        module.__dict__[place] = MethodType(type(module).forward, module)
    else:
        module.__dict__.pop(place, None)
