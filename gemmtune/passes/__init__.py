"""Kernels that read an operand once and write another form of it, for products that torch then multiplies.

They need Triton and a GPU, so a caller loads a module of this folder only for ``unwatched`` tensors. Each computes the same
numbers, rounded in the same steps, as the calls of torch that it replaces.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch


def unwatched(*tensors: torch.Tensor | None) -> bool:
    """Return True if a kernel may read these tensors directly: plain CUDA memory, and nothing records what happens to it.

    Autograd, dispatch and function modes, torch.func and the tracers of torch.compile need calls of torch.
    """
    if torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling() or torch._C._is_tracing() or not _triton():
        return False
    return all(x is None or _plain(x) for x in tensors)


def _plain(x: torch.Tensor) -> bool:
    whole = x.__class__ in (torch.Tensor, torch.nn.Parameter) and x.is_cuda and not x.is_conj() and not x.is_neg()
    return whole and not (x.requires_grad and torch.is_grad_enabled()) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


@functools.cache
def _triton() -> bool:
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


@functools.cache
def load(name: str) -> Any:
    """Return the module of this folder with that name. It imports Triton."""
    return importlib.import_module(f"{__name__}.{name}")
