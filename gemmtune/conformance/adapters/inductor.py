"""torch.compile's matrix products, with Triton kernels alone to choose from.

``static`` compiles and tunes anew for each size and each set of strides, which takes seconds: its traits admit few cases, and
``--max-examples 5 --level smoke`` is advised. ``dynamic`` compiles once for many sizes. Where no kernel fits, Inductor raises an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.config

from ..traits import Traits

__all__ = ["dynamic", "static"]

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
MOST_COMPILATIONS = 2**20
"""Past torch's own limit it would run the operation uncompiled, and that would be tested."""
torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
torch._dynamo.config.accumulated_recompile_limit = MOST_COMPILATIONS

_TRAITS = Traits(
    ops=("mm", "addmm", "bmm"),
    dtypes=("float16",),
    layouts=("row", "col"),
    alpha=True,
    beta=True,
    bias=("n", "mn"),
    streams=True,
    devices=("cuda",),
)
_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {"mm": torch.mm, "addmm": torch.addmm, "bmm": torch.bmm}


def _compiled(*, dynamic: bool, traits: Traits) -> SimpleNamespace:
    functions = {name: torch.compile(function, dynamic=dynamic, options=OPTIONS) for name, function in _OPERATIONS.items()}
    return SimpleNamespace(**functions, gemm_traits=traits)


static = _compiled(dynamic=False, traits=_TRAITS.changed({"least": (16, 16, 16), "multiples": (64, 64, 64), "ops": ("mm",)}))
dynamic = _compiled(dynamic=True, traits=_TRAITS.changed({"least": (2, 2, 2)}))
"""A size of 1 is a constant to torch.compile."""
