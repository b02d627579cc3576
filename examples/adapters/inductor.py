"""torch.compile's matrix products, with Triton kernels alone to choose from.

``static`` compiles and tunes for each size and each set of strides, ``dynamic`` for many sizes at once. Either takes seconds for a
kernel, so that a sample is what there is time for:

    cd examples; gemmtune conformance adapters.inductor:static --max-cases 120 --max-seconds 120 -- -n 8

What Inductor generates is looked at: where it calls a kernel of ATen instead, the case is refused, as it is where Inductor finds no
Triton kernel at all. The report names the kernels that ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.graph

from gemmtune.declaration.subject import Call, Impossible, NamespaceSubject
from gemmtune.declaration.traits import Traits

__all__ = ["CompiledSubject", "dynamic", "generated_kernels", "library_calls", "static"]

BACKENDS = "TRITON"
MOST_COMPILATIONS = 2**20
"""Past torch's own limit it would run the operation uncompiled, and that would be tested."""
torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
torch._dynamo.config.accumulated_recompile_limit = MOST_COMPILATIONS
# A compiled function out of these caches would not be generated, and so not be looked at. Compiled kernels and timings stay cached.
torch._functorch.config.enable_autograd_cache = False
_NO_CODE_CACHE = {"fx_graph_cache": False, "fx_graph_remote_cache": False}

_TRAITS = Traits(
    ops=("mm", "addmm", "bmm"),
    dtypes=("float16", "bfloat16"),
    layouts=("row", "col"),
    alpha=True,
    beta=True,
    bias=("n", "mn"),
    streams=True,
    devices=("cuda",),
)
_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {"mm": torch.mm, "addmm": torch.addmm, "bmm": torch.bmm}
_KERNEL = re.compile(r"async_compile\.triton\(\s*'(\w+)'")
_LIBRARY_CALL = re.compile(r"\b(?:extern_kernels|torch\.ops\.aten)\.[\w.]+(?=\()")
_SIZES = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
_generated: list[str] = []
"""The code of what was compiled since this was last emptied: candidates that are code of their own, then the function itself."""


def _keep(code: str) -> None:
    _generated.append(code)


torch._inductor.graph.GraphLowering.save_output_code = staticmethod(_keep)


def library_calls(code: str) -> list[str]:
    """The calls of ATen's kernels in generated code, each once."""
    return list(dict.fromkeys(_LIBRARY_CALL.findall(code)))


def generated_kernels(code: str) -> list[str]:
    """The Triton kernels in generated code; those of a template with their tile, such as ``triton_tem_fused_mm_0 64x128x32``."""
    found = list(_KERNEL.finditer(code))
    ends = [match.start() for match in found[1:]] + [len(code)]
    return [match[1] + _config(code[match.end() : end]) for match, end in zip(found, ends, strict=True)]


def _config(source: str) -> str:
    """The tile, stages and warps of a template's kernel; nothing for other kernels."""
    tile = [match[1] for name in _SIZES if (match := re.search(rf"\b{name}\s*:\s*tl\.constexpr = (\d+)", source))]
    if len(tile) < len(_SIZES):
        return ""
    more = [f", {match[1]} {what}" for what in ("stages", "warps") if (match := re.search(rf"\bnum_{what}=(\d+)", source))]
    return f" {'x'.join(tile)}{''.join(more)}"


class CompiledSubject(NamespaceSubject):
    """Compiled operations. One that is compiled to a call of ATen's kernel is refused.

    Args:
        backends: of which kernels Inductor may choose, as ``max_autotune_gemm_backends`` has them.
    """

    def __init__(self, name: str, traits: Traits, *, dynamic: bool, backends: str = BACKENDS) -> None:
        options: dict[str, str | int | bool | Callable[..., object]] = {
            "max_autotune": True,
            "max_autotune_gemm_backends": backends,
            **_NO_CODE_CACHE,
        }
        functions = {op: torch.compile(function, dynamic=dynamic, options=options) for op, function in _OPERATIONS.items()}
        super().__init__(name, SimpleNamespace(**functions), traits)
        self._kernels: dict[str, str] = {}

    def __call__(self, call: Call) -> object:
        """The operation, compiled if it was not for such operands."""
        _generated.clear()
        try:
            result = super().__call__(call)
        except RuntimeError as error:
            if "NoValidChoicesError" in str(error):
                raise Impossible("Inductor has no Triton kernel to choose from") from error
            raise
        if _generated:
            code = _generated[-1]
            if calls := library_calls(code):
                torch._dynamo.reset()  # else it would not be compiled, and not be looked at, the next time
                raise Impossible(f"Inductor generates no kernel for this, but calls {', '.join(calls)}")
            self._kernels[call.problem.key] = " + ".join(generated_kernels(code)) or "no kernel"
        return result

    def choice_of(self, call: Call) -> str:
        """The kernels that were compiled for the problem, or that another one was compiled to."""
        return self._kernels.get(call.problem.key, "compiled for an earlier case")


static = CompiledSubject(f"{__name__}:static", _TRAITS.changed({"least": (1, 1, 1)}), dynamic=False)
dynamic = CompiledSubject(f"{__name__}:dynamic", _TRAITS.changed({"least": (2, 2, 2)}), dynamic=True)
"""A size of 1 is a constant to torch.compile."""
