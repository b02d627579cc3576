"""Our layers for the package ``kernels`` of Hugging Face: ``kernelize`` and ``use_kernels=True`` of transformers take them.

Users import this module, because it imports ``kernels``.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from .modules import linear

try:
    from kernels import register_kernel_mapping, replace_kernel_forward_from_hub
except ModuleNotFoundError as error:
    remedy = "gemmtune.integration.hub: got no package kernels; expected it: pip install 'gemmtune[kernels]'"
    raise ModuleNotFoundError(remedy) from error

LINEAR = "GemmtuneLinear"
"""Name of ``nn.Linear`` in mappings. transformers' own mapping has ``Linear``, with layers for training from the network."""
DEVICES = ("cpu", "cuda", "rocm")


class Linear(nn.Module):
    """``nn.Linear`` by the stored pick if it beats torch, otherwise by torch. A call tunes nothing."""

    can_torch_compile = True
    has_backward = True
    forward = linear


@dataclass(frozen=True, slots=True)
class Installed:
    """A repository of layers that is this package, so that nothing is loaded from a folder or the network."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """Return the layer, whose ``forward`` replaces that of a model's."""
        return Linear


class _OfPlainLayers:
    """Class attribute that classes with another forward than ``nn.Linear``, such as layers of 4 bits, do not inherit."""

    def __get__(self, layer: nn.Module | None, kind: type[nn.Module]) -> str:
        if kind.forward is not nn.Linear.forward:
            raise AttributeError(f"{kind.__name__}: got a forward of its own, expected that of nn.Linear")
        return LINEAR


def register_kernels() -> None:
    """Let ``kernelize`` give ``nn.Linear`` our forward, in all modes and on CPUs and GPUs.

    ``gemmtune.optimize`` does the same and also tunes. ``gemmtune.restore`` removes the forward.
    """
    mapping: dict[str, dict[Any, Any]] = {LINEAR: dict.fromkeys(DEVICES, Installed(LINEAR))}
    register_kernel_mapping(mapping)
    replace_kernel_forward_from_hub(nn.Linear, _OfPlainLayers())
